"""What sampling leaves of a distribution, by brute force."""

import random

import pytest
import torch
from tiny_policy import brute_force_nucleus

from asyncrl.trainer.sampling import Sampling, sampling_logits


@pytest.mark.parametrize("seed", range(25))
def test_what_is_kept_equals_brute_force_and_always_holds_the_sampled_token(seed):
    draw = random.Random(seed).choice
    top_p, top_k = draw((1.0, 0.05, 0.5, 0.9, 0.999)), draw((0, 1, 3, 29, 30, 100))
    cuts = (top_p, top_k, draw((0.0, 0.001, 0.1, 0.99)))
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(40, 30, generator=generator)
    targets = torch.randint(0, 30, (40,), generator=generator)
    result = sampling_logits(logits, targets, Sampling(0.9, *cuts))
    pairs = zip(logits, targets.tolist(), strict=True)
    expected = [brute_force_nucleus(*pair, 0.9, *cuts) for pair in pairs]
    torch.testing.assert_close(result, torch.stack(expected))
    assert torch.isfinite(result.gather(1, targets[:, None])).all()
