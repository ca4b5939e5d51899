"""What `--save-memory auto` saves on GPUs of some size, and the share of an engine beside a trainer."""

import re
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from qwen3_models import folder_of, shape_of
from test_memory import LONG, gpu

from asyncrl.cluster.cluster import Cluster
from asyncrl.cluster.placement import place
from asyncrl.config import Config
from extras.planning.fit import first_that_fits, fit, plan_memory
from extras.planning.memory import GIB, Sharing, ways_to_fit

CASES = tomllib.loads(Path(__file__).with_name("fit.toml").read_text(encoding="utf-8"))["cases"]


def planned(config, gpus, ranks, size="0.6b"):
    """The placement with what memory needs, and the arithmetic."""
    placed = place(config, len(gpus), 16, ranks)
    return placed, *plan_memory(config, placed, shape_of(size), gpus, Sharing(ranks, ranks))


def test_engines_on_gpus_of_their_own_keep_their_share_and_are_checked():
    placed, placement, arithmetic = planned(Config(), [gpu(141)] * 4, 2)
    assert placement == placed and "trainer rank 0" in arithmetic and "engine, 90%" in arithmetic
    full = r"139\.0 of 141\.0 GiB are used by other processes.*gpu {} \(H200\)"
    for index in (0, 3):
        gpus = [gpu(141, used_gib=139 * (index == i)) for i in range(4)]
        with pytest.raises(ValueError, match=full.format(index)):
            planned(Config(), gpus, 2)
    with pytest.raises(ValueError, match="does not divide 16 attention heads"):
        planned(Config(rollout_tp=3), [gpu(141)] * 4, 1)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_memory_is_saved_as_far_as_it_must_be_by_smaller_passes_first(case):
    config = Config.from_dict(LONG | case.get("options", {}))
    ways, placed = ways_to_fit(config), place(config, 8, 64, case["ranks"])
    host_bytes = case.get("host_gib", 1000) * GIB
    sharing = Sharing(case["ranks"], case["ranks"], host_bytes=host_bytes)
    gpus = [gpu(case["gib"])] * 8
    fitted = ways[first_that_fits(ways, placed, shape_of(case["size"]), gpus, sharing)]
    assert fitted == Config.from_dict(config.as_dict() | case["fitted"])


def test_a_run_fits_itself_into_the_gpus_that_it_sees_and_prints_the_arithmetic(
    monkeypatch, capsys
):
    config, cluster = Config(**LONG), Cluster(ranks_of_nodes=((0, 1, 2, 3),))
    monkeypatch.setattr("extras.planning.fit.visible_gpus", lambda: [gpu(79.6)] * 8)
    monkeypatch.setattr("extras.planning.fit.free_host_bytes", lambda: 200 * GIB)
    placed = place(config, 8, 64, 4)
    fitted, placement = fit(config, placed, folder_of("8b"), cluster)
    assert (fitted.save_memory, fitted.max_tokens_per_microbatch) == (("head",), 4096)
    assert placement == placed
    text = capsys.readouterr().out
    assert "trainer rank 0, in a step" in text and "host memory of a machine: 122.05 GiB" in text
    monkeypatch.setattr("extras.planning.fit.free_host_bytes", lambda: 100 * GIB)
    with pytest.raises(ValueError, match=r"the host has 100\.0 GiB free.* 122\.05 GiB = copy of"):
        fit(config, placed, folder_of("8b"), cluster)


def test_an_engine_beside_a_trainer_is_left_room_for_a_quarter_of_its_requests(monkeypatch, capsys):
    """On a GPU that both share; by host memory, where the GPU has no room for the weights on their way."""
    monkeypatch.setattr("extras.planning.fit.visible_gpus", lambda: [gpu(80)])
    monkeypatch.setattr("extras.planning.fit.free_host_bytes", lambda: 200 * GIB)
    config = Config(**LONG)
    placed = place(config, 1, 16, 1)
    fitted, placement = fit(config, placed, folder_of("1.7b"), Cluster(ranks_of_nodes=((0,),)))
    held = int(re.search(r"(\d+) of 256 sequences", capsys.readouterr().out)[1])
    assert fitted.save_memory == () and held >= 64
    (worker,) = placement.workers
    assert worker.kv_cache_bytes == held * fitted.max_sequence_tokens * 114688
    shm = replace(config, weight_sync="shm", save_memory=("activations", "optimizer"))
    _, placement, text = planned(shm, [gpu(48)], 1, "8b")
    assert placement.transport == "shm" and "staging" not in text
    with pytest.raises(ValueError, match="--weight-sync shm, which stages in host memory"):
        planned(replace(shm, weight_sync="auto"), [gpu(48)], 1, "8b")
