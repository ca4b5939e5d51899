"""What a run says while it goes."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from asyncrl.cluster.cluster import Cluster
from asyncrl.cluster.placement import place
from asyncrl.config import Config
from asyncrl.controller.failures import Failures
from asyncrl.job.step_log import StepLog
from asyncrl.runlog.time_ledger import TimeLedger
from asyncrl.weights.models import load_tokenizer, resolve_model

RUN = SimpleNamespace(path=Path("runs/one"))
MODEL = resolve_model("tiny", "addition")


@pytest.mark.parametrize(
    ("shares", "advantage", "std", "num_steps"),
    [
        ([1.0] * 10, "grpo", 0.5, 3),
        ([1.0] * 2, "grpo", 0.0, 2),
        ([0.9, 1.0, 1.0, 1.0], "grpo", 0.0, None),
        ([1.0] * 10, "gae", 0.5, None),
        ([1.0] * 10, "gae", 0.0, 3),
    ],
)
def test_a_run_whose_groups_all_had_equal_rewards_says_once_that_it_learns_nothing(
    shares, advantage, std, num_steps, capsys
):
    """Unless the advantage compares all rewards, and they differ between groups; a short run says so at its end."""
    config = Config(steps=len(shares), advantage=advantage)
    log = StepLog(SimpleNamespace(config=config, clock=TimeLedger(), run=RUN))
    for step, share in enumerate(shares, start=1):
        rewards = {"reward/zero_variance_groups": share, "reward/mean": 0.0, "reward/std": std}
        log.warn_of_equal_rewards(step, rewards)
    text = capsys.readouterr().out
    assert text.count("\n") == (num_steps is not None)
    if num_steps:
        assert f"in {num_steps} steps no group had unequal rewards" in text
        assert "runs/one/samples.jsonl" in text


@pytest.mark.parametrize(
    ("shares", "num_cut"), [([0.9, 0.0], 36), ([1.0, 1.0], 40), ([0.875, 1.0], 0)]
)
def test_a_run_whose_first_responses_hardly_end_says_once_what_ends_one(shares, num_cut, capsys):
    config = Config(groups_per_step=10, group_size=4, max_response_tokens=17)
    rank = SimpleNamespace(
        config=config,
        clock=TimeLedger(),
        run=RUN,
        model_path=MODEL,
        tokenizer=load_tokenizer(MODEL),
    )
    log = StepLog(rank)
    for step, share in enumerate(shares, start=1):
        log.warn_of_cut_responses(step, {"response/cut": share})
    text = capsys.readouterr().out
    assert text.count("\n") == bool(num_cut)
    if num_cut:
        begin = f"warning: {num_cut} of 40 responses of the first batch reached --max-response-tokens 17; "
        ends = (
            "a response ends at '<eos>' (1: tokenizer, generation_config.json, config.json); raise"
        )
        assert text.startswith(begin + ends) and "runs/one/samples.jsonl" in text


def test_the_speed_of_a_run_is_also_that_of_each_of_its_gpus():
    placed = place(Config(rollout_tp=2), 8, 64, 4)
    assert [
        placed.num_gpus,
        place(Config(), 1, 8, 1).num_gpus,
        place(Config(), 0, 8, 1).num_gpus,
    ] == [8, 1, 0]
    assert place(Config(rollout_tp=2), 7, 64, 4).num_gpus == 6, "one GPU is idle"
    rank = SimpleNamespace(config=Config(), clock=TimeLedger(), cluster=Cluster())
    log = StepLog(rank)
    log.last_metrics = {"tokens/generated": 3000}
    metrics = {"tokens/generated": 4000, "time/step_s": 2.0}
    speed = {"rollout/tokens_per_s": 500.0}
    for num_gpus, per_gpu in ((0, {}), (8, {"rollout/tokens_per_s_per_gpu": 62.5})):
        rank.placement = SimpleNamespace(num_gpus=num_gpus)
        assert log.speed_metrics(metrics) == speed | per_gpu
    rank.config = Config(listen="127.0.0.1:1")
    assert log.speed_metrics(metrics) == speed, "the GPUs of joined hosts are not known"


@pytest.mark.parametrize(("num_nodes", "where"), [(1, ""), (2, "node 1 (h): ")])
def test_failures_are_reported_while_they_are_more_than_a_few(num_nodes, where, capsys):
    """Each leader reports those of its node, of the steps since the last report."""
    failures = Failures()
    controller = SimpleNamespace(failures=lambda: replace(failures, reasons={**failures.reasons}))
    cluster = SimpleNamespace(num_nodes=num_nodes, node=1, name="node {} (h)".format)
    log = StepLog(SimpleNamespace(controller=controller, cluster=cluster, clock=TimeLedger()))
    for num_failed in (0, 5, 0, 1):
        for number in range(100):
            failures.count("judge is down" if number < num_failed else "")
        log.report_failures()
    log.print_failures("in the whole run", failures)
    often = "failed; most often"
    assert capsys.readouterr().out.splitlines() == [
        f"warning: {where}in the last 10 steps 5 of 100 responses (5.0%) {often} (5): judge is down",
        f"warning: {where}in the whole run 6 of 400 responses (1.5%) {often} (6): judge is down",
    ]
