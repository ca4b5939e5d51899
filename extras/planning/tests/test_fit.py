"""What `--save-memory auto` saves on GPUs of some size, and the share of an engine beside a trainer."""

import re
from dataclasses import replace

import pytest

from asyncrl.cluster.cluster import Cluster
from asyncrl.cluster.placement import place
from asyncrl.config import Config
from extras.planning.fit import first_that_fits, fit, plan_memory
from extras.planning.memory import Sharing, ways_to_fit
from extras.planning.tests.test_memory import gpu, shape
from scripts.qwen3_shapes import qwen3_config


def test_engines_on_gpus_of_their_own_keep_their_share_and_are_checked():
    placed = place(Config(), 4, 16, 2)
    assert plan_memory(Config(), placed, shape("0.6b"), [gpu(141)] * 4, Sharing(2, 2))[0] == placed
    full = [gpu(141), gpu(141), gpu(141), gpu(141, used_gib=139)]
    with pytest.raises(
        ValueError, match=r"139\.0 of 141\.0 GiB are used by other processes.*gpu 3 \(H200\)"
    ):
        plan_memory(Config(), placed, shape("0.6b"), full, Sharing(2, 2))
    with pytest.raises(ValueError, match="does not divide 16 attention heads"):
        plan_memory(
            Config(rollout_tp=3),
            place(Config(rollout_tp=3), 4, 16, 1),
            shape("0.6b"),
            [gpu(141)] * 4,
            Sharing(1, 1),
        )


def test_nothing_is_planned_for_engines_where_no_worker_is():
    config = Config(num_rollout_workers=0, listen="host:1", rollout_tp=2, max_response_tokens=2048)
    _, arithmetic = plan_memory(
        config, place(config, 4, 16, 4), shape("1.7b"), [gpu(80)] * 4, Sharing(4, 4)
    )
    assert "engine" not in arithmetic and "AdamW" in arithmetic and "staging" not in arithmetic


def chosen(gib: float, num_gpus: int, ranks: int, size: str = "8b", **options) -> Config:
    """The options with what memory needs."""
    config = Config(max_prompt_tokens=512, max_response_tokens=2048, **options)
    ways, placed = ways_to_fit(config), place(config, num_gpus, 64, ranks)
    return ways[
        first_that_fits(ways, placed, shape(size), [gpu(gib)] * num_gpus, Sharing(ranks, ranks))
    ]


@pytest.mark.parametrize(
    ("gib", "num_gpus", "ranks", "size", "save_memory", "tokens"),
    [
        (141, 8, 4, "0.6b", (), 16384),
        (141, 8, 4, "8b", (), 8192),
        (79.6, 8, 4, "8b", (), 2560),
        (79.6, 8, 1, "8b", ("activations", "optimizer"), 16384),
        (32, 8, 4, "4b", ("activations",), 8192),
    ],
)
def test_memory_is_saved_as_far_as_it_must_be_by_smaller_passes_first(
    gib, num_gpus, ranks, size, save_memory, tokens
):
    config = chosen(gib, num_gpus, ranks, size)
    assert (config.save_memory, config.max_tokens_per_microbatch) == (save_memory, tokens)


def test_what_is_asked_for_by_name_is_not_chosen():
    asked = chosen(79.6, 8, 4, save_memory=())
    assert (asked.save_memory, asked.max_tokens_per_microbatch, asked.weight_sync) == (
        (),
        16384,
        "auto",
    )
    assert chosen(79.6, 8, 4, weight_sync="nccl").weight_sync == "nccl"


def test_an_engine_that_shares_a_gpu_is_left_room_for_a_quarter_of_its_requests_where_that_can_be():
    config = chosen(80, 1, 1, "1.7b")
    placed = place(config, 1, 16, 1)
    _, text = plan_memory(config, placed, shape("1.7b"), [gpu(80)], Sharing(1, 1))
    held = int(re.search(r"(\d+) of 256 sequences", text)[1])
    assert config.save_memory == () and held >= 64
    larger = replace(config, max_tokens_per_microbatch=8192)
    _, text = plan_memory(larger, placed, shape("1.7b"), [gpu(80)], Sharing(1, 1))
    assert int(re.search(r"(\d+) of 256 sequences", text)[1]) < 64


def test_a_run_fits_itself_into_the_gpus_that_it_sees_and_prints_the_arithmetic(
    tmp_path, monkeypatch, capsys
):
    qwen3_config("8b").save_pretrained(tmp_path)
    config = Config(max_prompt_tokens=512, max_response_tokens=2048)
    cluster = Cluster(ranks_of_nodes=((0, 1, 2, 3),))
    monkeypatch.setattr("extras.planning.fit.visible_gpus", lambda: [gpu(79.6)] * 8)
    placed = place(config, 8, 64, 4)
    fitted, placement = fit(config, placed, str(tmp_path), cluster)
    assert (fitted.save_memory, fitted.max_tokens_per_microbatch, placement) == ((), 2560, placed)
    assert "trainer rank 0, in a step" in capsys.readouterr().out
