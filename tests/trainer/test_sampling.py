import pytest
import torch
from tiny_policy import brute_force_nucleus

from asyncrl.trainer.sampling import Sampling, sampling_logits

CUTS = [
    *((top_p, 0, 0.0) for top_p in (0.05, 0.5, 0.9, 0.999)),
    *((1.0, top_k, 0.0) for top_k in (1, 3, 29, 30, 100)),
    *((1.0, 0, min_p) for min_p in (0.001, 0.1, 0.99)),
    (0.8, 5, 0.0), (0.8, 0, 0.1), (1.0, 5, 0.1), (0.9, 6, 0.05), (0.5, 2, 0.3),
]  # fmt: skip
"""top_p, top_k and min_p."""


@pytest.mark.parametrize(("top_p", "top_k", "min_p"), CUTS)
def test_what_is_kept_equals_brute_force_and_always_holds_the_sampled_token(top_p, top_k, min_p):
    generator = torch.Generator().manual_seed(1)
    logits = 3 * torch.randn(40, 30, generator=generator)
    targets = torch.randint(0, 30, (40,), generator=generator)
    result = sampling_logits(logits, targets, Sampling(0.9, top_p, top_k, min_p))
    cuts, pairs = (top_p, top_k, min_p), zip(logits, targets.tolist(), strict=True)
    expected = [brute_force_nucleus(*pair, 0.9, *cuts) for pair in pairs]
    torch.testing.assert_close(result, torch.stack(expected))
    assert torch.isfinite(result.gather(1, targets[:, None])).all()
