from torch import Tensor

from algos import weighted_topr
from algos.inputs import LossInputs


def loss(inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the per-token loss [N], and the detached stats [N]: ratio, weight, clipped (1 where a ratio is cut)."""
    return weighted_topr.loss(inputs)
