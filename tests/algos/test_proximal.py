import pytest
import torch

from algos.proximal import loglinear


@pytest.mark.parametrize("progress", [0.0, 0.25, 0.75])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_interpolates_by_version_without_gradient_and_is_exact_at_both_ends(progress, dtype):
    current = torch.tensor([-1.0, -2.0, -0.5, -3.0], dtype=dtype, requires_grad=True)
    behavior = torch.tensor([-1.5, -1.0, -2.5, -3.0], dtype=dtype)
    lags = torch.tensor([0, 1, 3, 16])
    shares = [1.0] * 4 if progress == 0 else [lag / (lag + progress) for lag in lags.tolist()]
    expected = behavior + torch.tensor(shares, dtype=dtype) * (current.detach() - behavior)
    found = loglinear(current, behavior, lags, progress)
    torch.testing.assert_close(found, expected, rtol=8 * torch.finfo(dtype).eps, atol=0)
    assert not found.requires_grad
    exact = current if progress == 0 else behavior
    assert found[0] == exact[0]
