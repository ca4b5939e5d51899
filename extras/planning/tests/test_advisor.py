"""The advisor's arithmetic against the paper's formulas, and its choices against every other choice."""

import dataclasses
import itertools
import math
import random
import statistics
import tomllib
from pathlib import Path

import pytest
from plan_oracle import drawn, least_seconds, most_seconds
from written_run import write_run

from asyncrl.cluster.placement import Placement, WorkerPlacement
from extras.planning.advice import (
    ALPHAS,
    RemoteHosts,
    advice_of,
    advise,
    advise_on_hosts,
    best_alpha,
    best_split,
    config_of,
    describe_lag,
    hosts_that_suffice,
    measure,
    measure_hosts,
)
from extras.planning.advisor import Measured, expected_step, predicted_lag
from scripts.report import ADVICE as ADVICE_LINE
from scripts.runs import frame

ADVICE, RUNS = (
    tomllib.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))
    for name in ("advice.toml", "runs.toml")
)
USUAL = Measured(1.0, 4, 2, "GPU", False, 64, 12.0, 4.0, 1.0, 3.0, 4.5)
"""6 GPUs of which 2 train; a step needs 12 GPU-seconds of decoding and 4 of training, its longest response 3 s."""
HOSTS = RemoteHosts((2.0, 4.0, 1.0, 2.0), 36, 5.0, 1.0, 1)
"""9 responses/s; a step trains 5 s on 36 responses, and weights take 1 s to a host."""


CHOICES = {
    "async_ratio": (0.0, 0.25, 1.0, 3.0),
    "rollout_devices": range(1, 6),
    "training_devices": range(1, 6),
    "unit": ("GPU", "CPU core"),
    "is_shared": (False, False, True),
    "decoding_s": (1.1, 4.0, 9.3, 20.0),
    "training_s": (1.3, 4.7, 8.9, 20.0),
    "response_max_s": (0.0, 1.0, 8.0),
    "step_s": (1.7, 4.3, 10.1, 19.0),
}


# Every split and α


def predictions(m, alpha, rollout, training):
    """A step's seconds at least and at most."""
    needed = m.decoding_s / rollout, m.training_s / training
    least_s = least_seconds(*needed, 0.0, alpha)
    return least_s, most_seconds(*needed, m.response_max_s, alpha)


def expected(m, alpha, rollout, training):
    """As far between both predictions as the measured step is."""
    low, high = predictions(m, m.async_ratio, m.rollout_devices, m.training_devices)
    share = 1.0 if high <= low else min(1.0, max(0.0, (m.step_s - low) / (high - low)))
    low, high = predictions(m, alpha, rollout, training)
    return low + share * (high - low)


@pytest.mark.parametrize("seed", range(40))
def test_the_advice_is_the_best_of_all_splits_and_the_least_alpha_within_a_tenth_of_the_best(seed):
    m = dataclasses.replace(USUAL, **drawn(random.Random(seed), CHOICES))
    now = (m.rollout_devices, m.training_devices)
    splits = [now]
    if not (m.is_shared and m.unit == "GPU"):
        splits += [(sum(now) - training, training) for training in range(1, sum(now))]
    seconds = {}
    for alpha in {*ALPHAS, m.async_ratio}:
        by_split = {split: expected(m, alpha, *split) for split in splits}
        seconds[alpha] = min(by_split.values())
        best = best_split(m, alpha)
        assert expected_step(m, alpha, *best) == pytest.approx(seconds[alpha])
        assert best == now or by_split[best] < by_split[now]
    near = [alpha for alpha, step_s in seconds.items() if step_s <= 1.1 * min(seconds.values())]
    assert best_alpha(m) == min(near)


@pytest.mark.parametrize(
    ("advise", "usual", "case"),
    [
        *((advise, USUAL, case) for case in ADVICE["devices"]),
        *((advise_on_hosts, HOSTS, case) for case in ADVICE["hosts"]),
    ],
)
def test_the_advice_is_this_text(advise, usual, case):
    assert advise(dataclasses.replace(usual, **case["changes"])) == case["text"].strip("\n")


# What is measured


@pytest.mark.parametrize(
    ("ranks", "threads", "engines", "transport", "devices"),
    [
        ((0, 1), 4, [WorkerPlacement(i, 2 + i, None, 1, 0.9) for i in range(3)], "nccl", (3, 2)),
        ((0,), 4, [WorkerPlacement(0, 0, 0, 1, 0.4)], "ipc", (1, 1)),
        (
            (None, None),
            2,
            [WorkerPlacement(i, None, None, 3, 0.0) for i in range(2)],
            "shm",
            (6, 4),
        ),
    ],
)
def test_measurements_are_means_without_the_first_quarter(
    ranks, threads, engines, transport, devices, tmp_path
):
    """A device is a core, or a GPU whether it is shared or not."""
    run = write_run(tmp_path, 20)
    rollout, training = devices
    assert measure(run, config_of(run), Placement(ranks, threads, engines, transport)) == Measured(
        async_ratio=1.0,
        rollout_devices=rollout,
        training_devices=training,
        unit="CPU core" if transport == "shm" else "GPU",
        is_shared=transport != "nccl",
        samples=4,
        decoding_s=pytest.approx(0.6 * rollout),
        training_s=pytest.approx(0.4 * training),
        response_mean_s=pytest.approx((0.1 + 0.55) / 2, abs=0.01),
        response_max_s=pytest.approx(0.55, abs=0.01),
        step_s=pytest.approx((5 * 2 + 10 * 1) / 15),
    )


def test_the_lag_is_predicted_from_the_time_of_a_group_and_the_share_of_the_trainer(tmp_path):
    """Steps 6 to 20 take 4/3 s, of which the trainer works for 0.4. Seven groups take 1.6 s and eight 1.5."""
    run = write_run(tmp_path, 20, async_ratio=4.0, publish_delay=2)
    group_steps, busy_share = (7 * 1.6 + 8 * 1.5) / 15 / (4 / 3), 0.4 / (4 / 3)
    assert describe_lag(run, config_of(run)) == (
        f"  lag: predicted {2 + group_steps + busy_share:.2f} steps by the rates (a group takes {group_steps:.2f} "
        "steps, the trainer is busy for 0.30) … 6.00 with all places taken; realised 1.30"
    )


def test_the_lag_by_the_rates_is_at_most_that_with_all_places_taken():
    assert predicted_lag(1.0, 2, 0.75, 0.5) == (3.0, 3.0)
    assert predicted_lag(4.0, 0, 0.25, 0.5) == (0.75, 4.0)


@pytest.mark.parametrize("case", RUNS["cases"], ids=str)
def test_a_run_gets_advice_or_a_line_that_says_why_not(case, tmp_path):
    run = write_run(tmp_path, case["num_steps"], **case.get("options", {}))
    run.info["hardware"] = {"gpus": [], "cpu_cores": 8}
    run.events["step"]["node"] = case.get("nodes", 0)
    if "without" in case:
        run.events[case["without"]] = frame([])
    try:
        text = advice_of(run)
        assert ADVICE_LINE.search(text), "scripts/report.py shows it"
    except ValueError as error:
        text = str(error).replace(str(tmp_path), "runs")
    assert text.startswith(case["line"])


# Remote hosts


@pytest.mark.parametrize("seed", range(60))
def test_hosts_are_enough_from_the_least_number_on_whose_responses_and_weights_fit_into_training(
    seed,
):
    """The fastest hosts come first, then more of the median rate."""
    draw = random.Random(seed)
    rates = draw.choices([1.0, 2.0, 4.0], k=draw.randint(1, 5))
    lag, broadcast_s = draw.choice([1, 2, 4]), draw.choice([0.0, 1.0, 4.5, 5.0, 11.0])
    m = RemoteHosts(tuple(rates), draw.choice([8, 16, 36, 48]), 5.0, broadcast_s, lag)
    hosts = sorted(rates, reverse=True) + [statistics.median(rates)] * 100
    enough = [
        count
        for count, rate in enumerate(itertools.accumulate(hosts), start=1)
        if lag * m.responses / rate + broadcast_s <= lag * 5.0 * (1 + 1e-9)
    ]
    assert hosts_that_suffice(m) == min(enough, default=math.inf)


def test_rates_are_of_the_time_in_which_a_worker_has_anything_to_sample(tmp_path):
    """Worker 0: 3 responses in 0–2 and 5–6 s; worker 1: one in 4 s; worker 2 has given none in the last steps."""
    lately = {13: [(0, 0.0, 1.5), (0, 1.0, 2.0)], 14: [(0, 5.0, 6.0), (1, 0.0, 4.0)]}
    run = write_run(
        tmp_path, 20, lambda step: lately.get(step, []) if step > 12 else [(2, 0.0, 1.0)]
    )
    run.events["update"].loc[:7, "broadcast_s"] = 99.0  # those before the fifth step ended
    m = measure_hosts(run, config_of(run))
    assert m.rates == pytest.approx((3 / 3, 1 / 4))
    assert (m.responses, m.refresh_lag) == (4, 1)
    assert (m.train_s, m.broadcast_s) == pytest.approx((0.4, 0.7))
