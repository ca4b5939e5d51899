"""An engine that computes in bfloat16 on the CPU, beside a trainer that does."""

import numpy as np
import pytest
import torch
from engine_pair import PROMPT

from asyncrl.config import Config
from extras.swarm.verify import allowed_distance, distance


@pytest.fixture(scope="module")
def options():
    return {"dtype": "bfloat16"}


def test_engine_and_trainer_agree_in_bfloat16_as_far_as_an_honest_machine_is_allowed_to_differ(
    pair,
):
    allowed = allowed_distance(Config(), torch.bfloat16)

    def gap(seed):
        completion = pair.generate(f"bfloat16-{seed}", seed=seed)
        return distance(
            pair.trainer_logprobs(PROMPT, completion.tokens), completion.behavior_logprobs
        )

    assert {spec.dtype for spec in pair.policy.sent_specs()} == {torch.bfloat16}
    gaps = [gap(seed) for seed in range(8)]
    assert 0 < max(gaps) < allowed
    for version in (1, 2):
        pair.perturb()
        assert max(gap(10 * version + seed) for seed in range(4)) > allowed, (
            "old weights are told from new ones"
        )
        pair.sync(version)
        assert max(gap(20 * version + seed) for seed in range(4)) < allowed


def test_scores_of_a_probe_differ_by_rounding_alone(pair):
    tokens = tuple(np.random.default_rng(1).integers(3, 150, 60).tolist())
    engine = pair.run(pair.proxy.score(tokens))
    trainer = pair.trainer_logprobs(tokens[:1], tokens[1:], raw=True)
    assert engine.dtype == np.float32
    assert 1e-6 < np.abs(engine - trainer).mean() < 0.05
