"""The rules of the alarm: their numbers against loops over tokens, and what they see in samples of known policies."""

import math

import numpy as np
import pytest

from extras.certificate.rules import RULES, TEXTS, TOKEN, describe_tokens, judge

VOCABULARY = 20
LIMITS = {"float32": 1e-4, "bfloat16": 0.15}
NOISE = {"float32": 1e-6, "bfloat16": 0.03}
"""Rounding of a log-prob, standard deviation, nats."""


def log_softmax(logits):
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def sample(rng, num_responses, dtype, behind=0, offset=0.0, change=0.02, lags=(0, 1, 2)):
    """Tokens that a policy samples whose logits change from version to version, with log-probs in a dtype.

    The engine has the weights of the version that is `behind` the stamped one, and adds `offset` to its log-probs.
    Engine and trainer round on their own.
    """
    parts = []
    for response in range(num_responses):
        length = int(rng.integers(4, 12))
        tokens = np.zeros(length, TOKEN)
        lag = int(rng.choice(lags))
        start = rng.normal(size=(length, VOCABULARY))
        velocity = change * rng.normal(size=(length, VOCABULARY))

        def logprobs(version, start=start, velocity=velocity):
            noise = NOISE[dtype] * rng.normal(size=start.shape)
            return log_softmax(start + version * velocity + noise)

        engine = logprobs(-behind)
        sampled_ids = [rng.choice(VOCABULARY, p=np.exp(row)) for row in engine]
        places = np.arange(length), sampled_ids
        tokens["response"], tokens["lag"] = response, lag
        tokens["recorded"] = engine[places] + offset
        names = {"stamped": 0, "now": lag, "before": -1, "after": 1}
        scores = {version: logprobs(version)[places] for version in {*names.values()}}
        for name, version in names.items():
            tokens[name] = scores[version]
        parts.append(tokens)
    return np.concatenate(parts)


def alarms(values):
    return {rule for rule in RULES if values[f"alarm_{rule}"]}


@pytest.mark.parametrize("dtype", LIMITS)
def test_right_stamps_and_log_probs_bring_no_alarm(dtype):
    """Also if weights do not change at all: then the neighbours are as near as the stamped version."""
    for seed in range(45):
        rng = np.random.default_rng(seed)
        windows = [sample(rng, number, dtype, change=0.02 * (seed % 3)) for number in (32, 64)]
        assert alarms(judge(windows, LIMITS[dtype], True)) == set(), seed


FAULTS = {
    "float32": [({"behind": 1}, {"size", "version"}), ({"offset": -0.02}, {"size", "shift"})],
    "bfloat16": [({"behind": 1}, {"version"}), ({"behind": -1}, {"version"}), ({"offset": -0.02}, {"shift"})],
}  # fmt: skip


@pytest.mark.parametrize("dtype", LIMITS)
def test_each_fault_breaks_its_rule_and_no_other(dtype):
    for fault, rules in FAULTS[dtype]:
        values = judge([sample(np.random.default_rng(0), 512, dtype, **fault)], LIMITS[dtype], True)
        assert alarms(values) == rules, fault
    if dtype == "bfloat16":
        assert values["shift"] == pytest.approx(math.expm1(0.02), abs=0.004)
        rng = np.random.default_rng(1)
        ahead = judge([sample(rng, 512, dtype, behind=-1)], LIMITS[dtype], True)
        assert "the version after the stamped one" in TEXTS["version"](ahead)


def test_a_mismatch_that_grows_with_the_lag_breaks_that_rule():
    """Old tokens were recorded after three more versions, as if their log-probs had been computed again."""
    rng = np.random.default_rng(0)
    fresh = sample(rng, 64, "bfloat16", lags=(0,))
    old = sample(rng, 64, "bfloat16", behind=-8, change=0.02, lags=(3,))
    old["response"] += 1000
    values = judge([np.concatenate([fresh, old])], LIMITS["bfloat16"], True)
    assert values["alarm_growth"] and not values["alarm_size"]
    assert not judge([old], LIMITS["bfloat16"], True)[
        "alarm_growth"
    ]  # without fresh tokens nothing grows


def test_one_old_response_is_no_growth_however_large_its_mismatch():
    rng = np.random.default_rng(0)
    fresh = sample(rng, 64, "bfloat16", lags=(0,))
    old = np.concatenate([sample(rng, 8, "bfloat16", behind=-8, change=0.02, lags=(3,))])
    old["response"] = 1000
    assert len(old) >= 32 and not judge([np.concatenate([fresh, old])], 0.15, True)["alarm_growth"]


def test_tokens_after_an_update_are_judged_only_if_their_keys_are_new():
    tokens = sample(np.random.default_rng(0), 64, "float32")
    tokens["after_update"] = tokens["response"] % 2 == 1
    tokens["recorded"] -= 0.01 * tokens["after_update"]
    assert alarms(judge([tokens], 1e-4, False)) == set()
    values = judge([tokens], 1e-4, True)
    assert "size" in alarms(values)
    assert values["worst"] == pytest.approx(0.01, rel=1e-3)  # of those tokens alone


def test_the_numbers_are_those_of_loops_over_tokens():
    tokens = sample(np.random.default_rng(3), 40, "bfloat16", behind=1)
    tokens["stamped"][::7] = np.nan
    tokens["before"][::5] = np.nan
    scored = [token for token in tokens if not math.isnan(token["stamped"])]
    metrics = describe_tokens(tokens)
    assert metrics["tokens"] == len(scored)
    assert metrics["unscored"] == pytest.approx(1 - len(scored) / len(tokens))
    for bucket, part in [("", scored)] + [
        (f"/lag_{lag}", [token for token in scored if token["lag"] == lag]) for lag in range(3)
    ]:
        pairs = {"mismatch": ("recorded", "stamped"), "drift": ("stamped", "now")}
        for name, (first, second) in pairs.items():
            gaps = [float(token[first] - token[second]) for token in part]
            assert metrics[f"{name}{bucket}"] == pytest.approx(sum(gaps) / len(gaps))
            assert metrics[f"{name}_abs{bucket}"] == pytest.approx(sum(map(abs, gaps)) / len(gaps))
            k3 = [math.exp(-gap) - 1 + gap for gap in gaps]
            assert metrics[f"{name}_k3{bucket}"] == pytest.approx(sum(k3) / len(k3), rel=1e-6)
    sums = {"shift": {}, "version_before": {}, "version_after": {}}
    for token in scored:
        gap, response = token["recorded"] - token["stamped"], int(token["response"])
        values = {"shift": math.exp(-gap) - 1}
        for name in ("before", "after"):
            values[f"version_{name}"] = gap**2 - (token["recorded"] - token[name]) ** 2
        for name, value in values.items():
            if not math.isnan(value):
                sums[name][response] = sums[name].get(response, 0.0) + float(value)
    judged = judge([tokens], 0.15, True)
    for name, parts in sums.items():
        error = math.sqrt(sum(value**2 for value in parts.values()))
        assert judged[f"{name}_sigmas"] == pytest.approx(sum(parts.values()) / error)


def test_too_few_tokens_are_not_judged():
    tokens = sample(np.random.default_rng(0), 64, "float32", offset=-0.5)[:31]
    assert alarms(judge([tokens, tokens[:0]], 1e-4, True)) == set()
    assert describe_tokens(tokens[:0]) == {"tokens": 0.0, "unscored": 0.0}
    values = judge([tokens], 1e-4, True)
    assert all(math.isfinite(value) for value in values.values())
    assert all(TEXTS[rule](values) for rule in RULES)
