"""An engine that computes in bfloat16 or float16 on the CPU, beside a trainer that does.

Faster, test_gpu_config.py shows that vLLM gets the dtype.
"""

import numpy as np
import pytest
import torch
from engine_pair import PROMPT

from asyncrl.config import Config
from asyncrl.job.probe import ALLOWED_MISMATCH
from extras.swarm.verify import allowed_distance, distance


@pytest.fixture(scope="module", params=["bfloat16", "float16"])
def options(request):
    return {"dtype": request.param}


@pytest.mark.slow
def test_engine_and_trainer_agree_as_far_as_an_honest_machine_is_allowed_to_differ(pair, options):
    dtype = getattr(torch, options["dtype"])
    allowed = allowed_distance(Config(), dtype)

    def gap(seed):
        completion = pair.generate(f"{dtype}-{seed}", seed=seed)
        return distance(
            pair.trainer_logprobs(PROMPT, completion.tokens), completion.behavior_logprobs
        )

    assert {spec.dtype for spec in pair.policy.sent_specs()} == {dtype}
    assert 0 < max(gap(seed) for seed in range(4)) < allowed
    pair.perturb()
    assert max(map(gap, (10, 11))) > allowed, "old weights are told from new ones"
    pair.sync(1)
    assert max(map(gap, (20, 21))) < allowed
    tokens = tuple(np.random.default_rng(1).integers(3, 150, 60).tolist())
    scored = pair.run(pair.proxy.score(tokens))
    assert scored.dtype == np.float32
    errors = np.abs(scored - pair.trainer_logprobs(tokens[:1], tokens[1:], raw=True))
    assert 1e-6 < errors.mean() < ALLOWED_MISMATCH[dtype] / 6, "it is rounding alone"
