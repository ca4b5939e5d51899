"""The cosine of each update's gradient and the one before: `--gradient-cosine`.

If it stays above 0, updates repeat a direction. In arXiv 2607.01083 this precedes a collapse of stale training. Stable
training has values near 0. Gradients are taken before clipping. A copy of a rank's gradient is kept, 4 bytes per
trained weight of its shard. No checkpoint has the copy, so the first update of a run or a resume has no cosine.
"""

import math
from typing import TYPE_CHECKING

from asyncrl.plugins import Plugin, PolicyPlugin

# The policy imports transformers for seconds, and options are checked before any process starts.
if TYPE_CHECKING:
    from torch import Tensor

    from asyncrl.trainer.policy import Policy


class GradientCosine(PolicyPlugin):
    """Compares each gradient of a policy's trained weights with the one before."""

    def __init__(self, policy: "Policy") -> None:
        self._policy = policy
        self._before: list[Tensor] | None = None
        """This rank's shards of the gradient before, [*] float32 each."""
        self._products: list[Tensor] = []
        """[3] float64 for each update of the step: now · before, now · now, before · before, of this rank's shards."""

    def after_backward(self) -> None:
        """Take the products of two gradients, and keep the newer one."""
        import torch

        from asyncrl.trainer.sharding import own_shard

        now = [
            own_shard(parameter.grad).clone()
            for parameter in self._policy.module.parameters()
            if parameter.grad is not None
        ]
        if self._before is not None:
            pairs = ((now, self._before), (now, now), (self._before, self._before))
            self._products.append(torch.stack([_dot(*pair) for pair in pairs]))
        self._before = now

    def metrics(self) -> dict[str, float]:
        """Return the mean cosine of the step's updates; collective."""
        products, self._products = self._products, []
        cosines = []
        for sums in products:
            mixed, now, before = self._policy.sum_over_ranks(sums).tolist()
            if math.isfinite(now + before):  # with --dtype float16 a gradient can overflow
                cosines.append(mixed / (now * before) ** 0.5 if now and before else 0.0)
        return {"loss/gradient_cosine": sum(cosines) / len(cosines)} if cosines else {}


def _dot(gradient: "list[Tensor]", other: "list[Tensor]") -> "Tensor":
    """Return the scalar product of two gradients, [] float64."""
    products = ((a * b).sum() for a, b in zip(gradient, other, strict=True))
    return sum(product.double() for product in products)


class GradientCosinePlugin(Plugin):
    """The changes of --gradient-cosine."""

    def make_policy_plugin(self, policy: "Policy") -> GradientCosine:
        """Return the comparison of a policy's gradients."""
        return GradientCosine(policy)


PLUGIN = GradientCosinePlugin()
