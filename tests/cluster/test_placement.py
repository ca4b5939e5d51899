"""Where the processes of a node go, and what does not fit: cases.toml."""

import tomllib
from pathlib import Path

import pytest

from asyncrl.cluster.cluster import check_shares
from asyncrl.cluster.placement import place
from asyncrl.config import Config

CASES = tomllib.loads((Path(__file__).parent / "cases.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", CASES["node"], ids=lambda case: str(case["given"]))
def test_each_node_has_its_table(case):
    placement = place(Config(**case.get("options", {})), **case["given"])
    assert placement.table() == case["table"].strip()
    worker_threads = {worker.cpu_threads for worker in placement.workers}
    assert [placement.trainer_threads, *worker_threads] == case["threads"]


@pytest.mark.parametrize("case", CASES["refused"], ids=lambda case: str(case["given"]))
def test_what_does_not_fit_is_refused_with_the_arithmetic(case):
    with pytest.raises(ValueError) as caught:
        place(Config(**case.get("options", {})), **case["given"])
    assert str(caught.value) == case["line"]


def test_a_node_has_its_share_of_the_groups():
    config = Config(groups_per_step=32, extra_groups=4, async_ratio=0.5)
    check_shares(config, num_nodes=4, num_ranks=8)
    part = config.for_node(4)
    assert (part.groups_per_step, part.extra_groups, part.max_outstanding_groups) == (8, 1, 13)
    assert part.max_staleness == config.max_staleness


@pytest.mark.parametrize("case", CASES["four_nodes"], ids=lambda case: str(case["options"]))
def test_what_four_nodes_of_two_ranks_cannot_share_is_refused_with_the_arithmetic(case):
    with pytest.raises(ValueError) as caught:
        check_shares(Config(**case["options"]), num_nodes=4, num_ranks=8)
    assert str(caught.value) == case["line"]
