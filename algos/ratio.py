"""The importance ratio, which every loss reports and most of them use."""

from torch import Tensor

MAX_LOG_RATIO = 20.0


def importance_ratio(log_ratio: Tensor) -> Tensor:
    """Return exp(log_ratio) of values clamped to ±20 nats, [N]; past that a ratio has no gradient.

    Beyond 88 nats it would be infinite in float32, and where a clip cuts an infinite ratio's gradient to 0, 0·∞ is NaN.
    """
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
