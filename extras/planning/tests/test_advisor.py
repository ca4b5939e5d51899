"""The advisor's arithmetic against numbers worked out by hand and against the paper's formulas in the paper's units."""

import dataclasses
import itertools
import math
from types import SimpleNamespace

import pytest

from asyncrl.cluster.placement import Placement, WorkerPlacement
from asyncrl.config import Config
from extras.planning.advice import (
    RemoteHosts,
    advice_of,
    advise,
    advise_on_hosts,
    best_alpha,
    best_split,
    hosts_that_suffice,
    measure,
    measure_hosts,
    rate_that_suffices,
    training_share_by_proposition_2,
)
from extras.planning.advisor import Measured, expected_step, predicted_step, tail_share
from scripts.runs import frame

CONFIG = Config(async_ratio=1.0, groups_per_step=16, group_size=4)


def measured(**changes):
    """6 GPUs of which 2 train; a step needs 12 GPU-seconds of decoding and 4 of training, its longest response 3 s.

    A step takes as long as proposition 2 allows.
    """
    usual = Measured(1.0, 4, 2, "GPU", False, 64, 12.0, 4.0, 1.0, 3.0, 4.5)
    return dataclasses.replace(usual, **changes)


# The paper: K workers take mu_gen for each of N samples, one by one; E epochs of mu_train a sample; a share beta trains


def paper_bound(n, k, mu_gen, l_gen, epochs, mu_train, alpha, beta):
    generation = n * mu_gen / ((1 - beta) * k) + l_gen / (alpha + 1)
    return max(generation, epochs * n * mu_train / (beta * k))


def paper_share(n, k, mu_gen, l_gen, epochs, mu_train, alpha):
    training = epochs * n * mu_train
    return training / (n * mu_gen + k * l_gen / (alpha + 1) + training)


@pytest.mark.parametrize("alpha", [1, 2, 4])
@pytest.mark.parametrize(
    ("n", "k", "mu_gen", "l_gen", "epochs", "mu_train"),
    [(256, 64, 1.6, 20, 1, 0.5), (32, 8, 2, 2, 2, 3)],
)
def test_with_one_sample_at_a_time_both_formulas_are_the_papers(
    n, k, mu_gen, l_gen, epochs, mu_train, alpha
):
    m = measured(
        decoding_s=n * mu_gen,
        training_s=epochs * n * mu_train,
        response_max_s=l_gen,
        rollout_devices=k - 1,
        training_devices=1,
    )
    best = paper_share(n, k, mu_gen, l_gen, epochs, mu_train, alpha)
    assert training_share_by_proposition_2(m, alpha) == pytest.approx(best)
    for beta in (0.1, 0.5, best):
        bound = predicted_step(m, alpha, (1 - beta) * k, beta * k)[1]
        assert bound == pytest.approx(
            paper_bound(n, k, mu_gen, l_gen, epochs, mu_train, alpha, beta)
        )
    limit = (n / k) * (mu_gen + epochs * mu_train) + l_gen / (alpha + 1)
    assert predicted_step(m, alpha, (1 - best) * k, best * k)[1] <= limit * (1 + 1e-9)


def test_the_papers_example_of_lognormal_lengths():
    """K = 64, N = 256, mu_train = 0.5, lengths of lognormal(0, 1) cut at 20: its shares of 0.108, 0.131 and 0.159."""
    mean = math.exp(0.5) * 0.5 * math.erfc(-(math.log(20) - 1) / math.sqrt(2))
    mean += 20 * 0.5 * math.erfc(math.log(20) / math.sqrt(2))
    m = measured(
        decoding_s=256 * mean,
        training_s=128.0,
        response_max_s=20.0,
        rollout_devices=63,
        training_devices=1,
    )
    shares = [training_share_by_proposition_2(m, alpha) for alpha in (1, 2, 4)]
    assert shares == pytest.approx([0.108, 0.131, 0.159], abs=1e-3)


# By hand


@pytest.mark.parametrize(
    ("alpha", "training", "least_s", "most_s"),
    [
        (0, 2, 12 / 4 + 4 / 2, 12 / 4 + 3 + 4 / 2),
        (0.25, 2, (12 / 4 + 4 / 2) / 1.25, (12 / 4 + 3 + 4 / 2) / 1.25),
        (1, 2, 12 / 4, 12 / 4 + 3 / 2),
        (2, 2, 12 / 4, 12 / 4 + 3 / 3),
        (2, 0.5, 4 / 0.5, 4 / 0.5),
    ],
)
def test_a_step_is_predicted_by_the_rates_and_by_proposition_2(alpha, training, least_s, most_s):
    assert predicted_step(measured(), alpha, 4, training) == (least_s, most_s)


def test_the_best_split_is_the_best_of_all_and_the_present_one_unless_another_is_better():
    seconds = {t: max(12 / (6 - t) + 1.5, 4 / t) for t in range(1, 6)}
    assert min(seconds, key=seconds.get) == 1 and best_split(measured(), 1) == (5, 1)
    assert best_split(measured(rollout_devices=1, training_devices=1), 1) == (1, 1)
    even = measured(
        decoding_s=6.0, training_s=6.0, response_max_s=0.0, rollout_devices=3, training_devices=3
    )
    assert best_split(even, 1) == (3, 3)
    assert best_split(measured(is_shared=True, rollout_devices=1, training_devices=1), 1) == (1, 1)


def test_the_advised_alpha_is_the_least_that_is_nearly_as_good_as_any():
    assert best_alpha(measured(response_max_s=0.0)) == 1.0, (
        "with equal lengths one batch ahead is all there is to gain"
    )
    assert best_alpha(measured()) == 4.0, (
        "4, 4, 12/4 + 3/5 = 3.6, and 12/4 + 3/9 = 3.33 s, which is 8 % less"
    )
    one_each = measured(
        rollout_devices=1, training_devices=1, training_s=12.0, response_max_s=6.0, step_s=15.0
    )
    assert best_alpha(one_each) == 4.0, (
        "12 + 6/5 = 13.2 s is within 10 % of 12 + 6/9 = 12.67 s, 12 + 6/3 = 14 s is not"
    )


def test_what_is_expected_lies_between_both_predictions_where_the_measured_step_does():
    third = measured(step_s=3.5)
    assert tail_share(third) == pytest.approx(1 / 3), "3.5 s between 12/4 and 12/4 + 3/2"
    assert expected_step(third, 0, 4, 2) == pytest.approx(5 + 3 / 3)
    assert (tail_share(measured(step_s=2.0)), tail_share(measured(step_s=9.0))) == (0.0, 1.0)
    assert best_alpha(measured(step_s=3.0)) == 1.0, (
        "nothing is waited for that more overlap would hide"
    )


def test_the_advice_shows_its_arithmetic():
    text = advise(measured())
    assert (
        "advice on α (now 1) and on the split of 6 GPUs (now 4 for rollout + 2 for training); a step took 4.500 s"
        in text
    )
    assert "t/(g+t) = 4.000/(12.000+4.000) = 25%" in text
    assert "t/(g+D·L/(α+1)+t) = 4.000/(12.000+6·3.000/2+4.000) = 16%; now 33%" in text
    assert "α = 1    3.000 … 4.500 (now); with 5 for rollout + 1 for training 4.000 … 4.000" in text
    assert (
        "advice: --async-ratio 4: predicted 1.25× (1.00× by the rates, 1.25× by proposition 2"
        in text
    )
    assert "share these" not in text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"decoding_s": 3.0, "training_s": 3.0, "response_max_s": 0.1}, "leave both as they are"),
        ({"is_shared": True, "unit": "CPU core", "async_ratio": 0.0}, "promise too much"),
        ({"is_shared": True, "unit": "CPU core"}, "took part of them"),
    ],
)
def test_it_says_where_nothing_is_gained_and_what_numbers_of_shared_cores_cannot_mean(
    changes, words
):
    assert words in advise(measured(rollout_devices=1, training_devices=1, **changes))


# What is measured


def make_run(num_steps, spans, **config):
    """A run whose steps are twice as slow in its first half as in the second.

    A step trains 0.4 s. Two workers decode for 0.6 s of it each. 2,000 tokens are for training, 1,000 are an
    evaluation's. Weights take 0.6 and 0.8 s to the workers. `spans(step)` are worker, start and end of the responses of
    a step. Before the first step there was a large evaluation.
    """
    numbers, now = range(1, num_steps + 1), 0.0
    metrics, events = [], {"step": [], "trajectory": [], "update": []}
    events["trajectory"].append({"group": -1, "time": -1.0, "tokens": 10**6})
    for step in numbers:
        step_s = 2.0 if step <= num_steps / 2 else 1.0
        now += step_s
        times = {
            "time/step_s": step_s,
            "time/wait_s": step_s - 0.4,
            "worker_time/decoding": 0.6 / step_s,
        }
        metrics.append({"step": step, "tokens/generated": 500 + 2000 * step, **times})
        events["step"].append({"step": step, "time": now, "groups": [step], "node": 0})
        for worker, start, end in spans(step):
            response = {
                "worker": worker,
                "started_at": start,
                "ended_at": end,
                "time": now,
                "tokens": 5,
            }
            events["trajectory"].append({"group": step, **response})
        events["trajectory"].append({"group": -1, "time": now, "tokens": 1000})
        events["update"] += [
            {"time": now + 0.01, "broadcast_s": 0.6},
            {"time": now + 0.01, "broadcast_s": 0.8},
        ]
    made = dataclasses.asdict(dataclasses.replace(CONFIG, **config))
    info = {"config": made, "hardware": {"gpus": [], "cpu_cores": 8}, "world_size": 1}
    frames = {kind: frame(lines) for kind, lines in events.items()}
    return SimpleNamespace(path="runs/one", metrics=frame(metrics), events=frames, info=info)


def usual_spans(step):
    return [(0, 0.0, 0.1), (0, 1.0, 1.5 + 0.1 * (step % 2))]


def test_measurements_are_means_without_the_first_quarter_and_without_evaluations():
    workers = tuple(WorkerPlacement(i, None, None, 3, 0.0) for i in range(2))
    m = measure(make_run(20, usual_spans), CONFIG, Placement((None, None), 2, workers, "shm"))
    assert (m.rollout_devices, m.training_devices, m.unit, m.is_shared) == (6, 4, "CPU core", True)
    assert m.decoding_s == pytest.approx(0.6 * 6 * 2 / 3), (
        "6 cores; a third of the tokens were an evaluation's"
    )
    assert m.training_s == pytest.approx(0.4 * 4) and m.response_max_s == pytest.approx(
        0.55, abs=0.01
    )
    assert m.response_mean_s == pytest.approx((0.1 + 0.55) / 2, abs=0.01)
    assert (m.async_ratio, m.samples) == (1.0, 64)
    assert m.step_s == pytest.approx((5 * 2 + 10 * 1) / 15)


def test_a_gpu_is_a_device_whether_shared_or_not():
    run = make_run(8, usual_spans)
    own = tuple(WorkerPlacement(i, 2 + i, None, 1, 0.9) for i in range(3))
    m = measure(run, CONFIG, Placement((0, 1), 4, own, "shm"))
    assert (m.rollout_devices, m.training_devices, m.unit, m.is_shared) == (3, 2, "GPU", False)
    shared = measure(run, CONFIG, Placement((0,), 4, (WorkerPlacement(0, 0, 0, 1, 0.4),), "ipc"))
    assert (shared.rollout_devices, shared.training_devices, shared.is_shared) == (1, 1, True)


def test_the_advice_for_a_run_is_on_devices_or_where_hosts_may_join_on_these():
    assert advice_of(make_run(8, usual_spans)).startswith(
        "advice on α (now 1) and on the split of 8 CPU cores"
    )
    joined = advice_of(make_run(8, usual_spans, listen="127.0.0.1:5000"))
    assert joined.startswith("advice on remote hosts: 1 workers give Σμ = ")


@pytest.mark.parametrize(
    ("num_steps", "options", "why"),
    [
        (7, {}, "runs/one has 7 steps, and advice needs 8"),
        (8, {"over_sampling": 2.0, "async_ratio": 0.0}, "nothing to balance"),
        (8, {"listen": "127.0.0.1:5000", "async_ratio": 0.0}, "nothing to balance"),
    ],
)
def test_a_run_that_advice_does_not_describe_is_refused(num_steps, options, why):
    with pytest.raises(ValueError, match=why):
        advice_of(make_run(num_steps, usual_spans, **options))


def test_a_run_of_several_nodes_or_without_responses_is_refused():
    run = make_run(8, usual_spans)
    run.events["step"]["node"] = [0, 1] * 4
    with pytest.raises(ValueError, match="has several nodes"):
        advice_of(run)
    run.events["trajectory"] = frame([])
    with pytest.raises(ValueError, match="does not record which responses"):
        advice_of(run)


# Remote hosts


def hosts(**changes):
    """Rates of 4, 2, 2 and 1 response/s; a step trains 5 s on 36 responses, and weights take 1 s to a host."""
    return dataclasses.replace(RemoteHosts((2.0, 4.0, 1.0, 2.0), 36, 5.0, 1.0, 1), **changes)


def test_the_rate_that_suffices_just_fits_responses_and_broadcast_into_training():
    for lag, broadcast_s in itertools.product((1, 2, 4), (0.0, 1.0, 4.9)):
        m = hosts(refresh_lag=lag, broadcast_s=broadcast_s)
        rate = rate_that_suffices(m)
        assert lag * m.responses / rate + broadcast_s == pytest.approx(lag * m.train_s)
    assert rate_that_suffices(hosts()) == 36 / (5 - 1) == 9.0
    assert rate_that_suffices(hosts(refresh_lag=2)) == 2 * 36 / (2 * 5 - 1) == 8.0


def test_a_broadcast_as_long_as_training_leaves_no_number_of_hosts_that_is_enough():
    assert math.isinf(rate_that_suffices(hosts(broadcast_s=5.0)))
    assert math.isinf(hosts_that_suffice(hosts(broadcast_s=6.0)))
    text = advise_on_hosts(hosts(broadcast_s=11.0))
    assert "no number of hosts is enough" in text and "refresh_lag must be at least 3" in text
    assert not math.isinf(hosts_that_suffice(hosts(broadcast_s=11.0, refresh_lag=3)))


def test_the_fastest_hosts_are_counted_first_and_then_more_of_the_median_rate():
    assert hosts_that_suffice(hosts()) == 4, "9 of 9 responses/s"
    assert hosts_that_suffice(hosts(broadcast_s=0.5)) == 3, "8 of 4 + 2 + 2"
    assert hosts_that_suffice(hosts(responses=16)) == 1, "4 of 4"
    assert hosts_that_suffice(hosts(responses=48)) == 6, (
        "12 are needed, 9 are there, and the median is 2"
    )


def test_the_advice_on_hosts_shows_its_arithmetic():
    text = advise_on_hosts(hosts(responses=48, refresh_lag=2))
    assert "4 workers give Σμ = 9 responses/s" in text
    assert "2·48/9 + 1.000 = 11.667 s must fit into κ·T_train = 2·5.000 = 10.000 s" in text
    assert text.endswith("1 more hosts of the median rate 2/s are enough")
    assert advise_on_hosts(hosts(broadcast_s=0.5)).endswith("the fastest 3 of them are enough")


def test_rates_are_of_the_time_in_which_a_worker_has_anything_to_sample():
    """Worker 0: 3 responses in 0–2 and 5–6 s; worker 1: one in 4 s; worker 2 has given none in the last steps."""
    lately = {13: [(0, 0.0, 1.5), (0, 1.0, 2.0)], 14: [(0, 5.0, 6.0), (1, 0.0, 4.0)]}
    run = make_run(20, lambda step: lately.get(step, []) if step > 12 else [(2, 0.0, 1.0)])
    run.events["update"].loc[:7, "broadcast_s"] = 99.0  # those before the fifth step ended
    m = measure_hosts(run, CONFIG)
    assert m.rates == pytest.approx((3 / 3, 1 / 4))
    assert (m.responses, m.train_s, m.broadcast_s, m.refresh_lag) == (
        64,
        pytest.approx(0.4),
        pytest.approx(0.7),
        1,
    )
