"""A scaled loss for `--dtype float16`. Its gradients would round to zero, and its updates can overflow.

float16 has 11 significant bits and bfloat16 has 8. So trainer and engine round an eighth as much. But float16 has no
numbers below 6e-8 or above 65,504. The source is «Mixed Precision Training», Micikevicius et al., arXiv 1710.03740,
section 3.2. Slopes are multiplied by a scale when they enter the computation in float16. Gradients in float32 are
divided by it. If a gradient is infinite on any rank, the update is skipped and the scale is halved. After
UPDATES_TO_DOUBLE updates without an infinite gradient it is doubled.

A skipped update changes no weight, optimizer state or warm-up. Its step makes a version like any other step. If the
step has no other update, that version has the weights of the version before.

Differs from torch.amp.GradScaler: the loss itself is not scaled, so code that reads its slopes needs no scale. The norm
of the gradient, over all ranks, shows whether it is finite.
"""

import math
from typing import TYPE_CHECKING

from torch import Tensor, nn

from asyncrl.config import Rule
from asyncrl.plugins import Plugin, PolicyPlugin

# The policy imports transformers for seconds, and options are checked before any process starts.
if TYPE_CHECKING:
    from asyncrl.trainer.logprobs import TokenScores
    from asyncrl.trainer.policy import Policy

FIRST_SCALE = 2.0**16
LEAST_SCALE = 1.0
UPDATES_TO_DOUBLE = 200
"""torch.amp.GradScaler waits for 2,000 updates; a run of reinforcement learning often has no more than hundreds."""
RULES: list[Rule] = [
    (
        lambda c: c.optim.seq_aux_loss_coef > 0,
        "--dtype float16 scales the loss of tokens, and --optim.seq-aux-loss-coef {c.optim.seq_aux_loss_coef:g} is a "
        "loss beside it; use --dtype bfloat16, or leave --optim.seq-aux-loss-coef out",
    ),
]


class ScaledLoss(PolicyPlugin):
    """Scales the slopes of a policy's loss, and skips updates that overflow.

    Scale and count are values of the optimizer's first group, because checkpoints keep these.
    """

    def __init__(self, policy: "Policy") -> None:
        self._num_skipped = 0
        self._optimizer = policy.optimizer
        self._scaling = policy.optimizer.param_groups[0]
        self._scaling |= {"loss_scale": FIRST_SCALE, "updates_since_change": 0}
        policy.module.register_forward_hook(self._scale_slopes)

    def _scale_slopes(
        self, module: nn.Module, inputs: tuple, scores: "TokenScores"
    ) -> "TokenScores":
        scaled = [None if column is None else self._with_scaled_slopes(column) for column in scores]
        return scores._make(scaled)

    def _with_scaled_slopes(self, values: Tensor) -> Tensor:
        """Return the values. On its way back a slope is scaled behind who listens to what is returned."""
        if values.requires_grad:
            values.register_hook(lambda slopes: slopes * self._scaling["loss_scale"])
        return values.view_as(values)

    def after_backward(self) -> None:
        """Divide the gradients by the scale."""
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.div_(self._scaling["loss_scale"])

    def skips_update(self, loss: float, is_finite: bool) -> bool:
        """Halve the scale for an update that overflows, and skip it. Double it after many that do not.

        An update that a smaller scale does not help is not skipped, and ends the run.
        """
        if is_finite:
            self._scaling["updates_since_change"] += 1
            if self._scaling["updates_since_change"] == UPDATES_TO_DOUBLE:
                self._change_scale(2)
            return False
        if not math.isfinite(loss) or self._scaling["loss_scale"] <= LEAST_SCALE:
            return False
        self._num_skipped += 1
        self._change_scale(0.5)
        return True

    def metrics(self) -> dict[str, float]:
        """Return the scale of the next update, and the number of skipped updates of this step."""
        num_skipped = self._num_skipped
        self._num_skipped = 0
        return {"loss/scale": self._scaling["loss_scale"], "loss/skipped_updates": num_skipped}

    def _change_scale(self, factor: float) -> None:
        self._scaling["loss_scale"] *= factor
        self._scaling["updates_since_change"] = 0


class Float16Plugin(Plugin):
    """The changes of --dtype float16."""

    rules = RULES

    def make_policy_plugin(self, policy: "Policy") -> ScaledLoss:
        """Return the scaled loss of a policy."""
        return ScaledLoss(policy)


PLUGIN = Float16Plugin()
