"""An engine that computes in bfloat16 on the CPU, beside a trainer that does.

Faster, test_gpu_config.py shows that vLLM gets the dtype.
"""

import numpy as np
import pytest
import torch
from engine_pair import PROMPT

from asyncrl.config import Config
from extras.swarm.verify import allowed_distance, distance


@pytest.fixture(scope="module")
def options():
    return {"dtype": "bfloat16"}


@pytest.mark.slow
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
    assert 0 < max(gap(seed) for seed in range(4)) < allowed
    pair.perturb()
    assert max(map(gap, (10, 11))) > allowed, "old weights are told from new ones"
    pair.sync(1)
    assert max(map(gap, (20, 21))) < allowed
    tokens = tuple(np.random.default_rng(1).integers(3, 150, 60).tolist())
    scored = pair.run(pair.proxy.score(tokens))
    assert scored.dtype == np.float32
    errors = np.abs(scored - pair.trainer_logprobs(tokens[:1], tokens[1:], raw=True))
    assert 1e-6 < errors.mean() < 0.05, "it is rounding alone"
