"""What `--optim-args` say of AdamW and of its learning rate."""

import inspect
import math
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from algos.arguments import AtLeastOne, Count, NonNegative, Share
from config import Config, read_arguments


@dataclass(frozen=True)
class OptimOptions:
    """Options of the optimizer that few runs change; their names and defaults are those of `--optim-args`."""

    epochs: AtLeastOne = 1
    """Times that a step goes over its batch: `minibatches` updates each time."""
    warmup: Count = 5
    """Optimizer updates of linear warm-up."""
    weight_decay: NonNegative = 0.0
    """AdamW's."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """From warm-up, which is linear, to the run's last update."""
    least: Share = 0.0
    """What linear and cosine end at, of lr."""
    by_ess: bool = False
    """Whether lr is multiplied by √(effective sample size / sequences of the update): VCPO, arXiv 2602.17616, where the
    importance ratios are those of whole sequences; its baseline is not here."""
    entropy: NonNegative = 0.0
    """Weight of the policy's entropy, nats, of each trained token, which is subtracted from its loss."""
    beta1: Share = 0.9
    beta2: Share = 0.999

    @classmethod
    def of(cls, config: Config) -> "OptimOptions":
        """The options of a run. Raises ValueError, in one line, for what is none of them."""
        parameters = inspect.signature(cls, eval_str=True).parameters.values()
        options = cls(**read_arguments("optim-args", config.optim_args, "the optimizer", parameters))
        if max(options.beta1, options.beta2) == 1:
            raise ValueError("--optim-args beta1 and beta2 must be below 1, where AdamW would see no gradient")
        return options

    def learning_rate(self, config: Config, update: int, steps_made: float, sequence_ess: float = 1.0) -> float:
        """Learning rate of update number `update` ≥ 0, whose sequences have that effective sample size, 0–1.

        `steps_made` are the run's steps before it, with the share of the one under way: a schedule follows them, and so
        ends with the run when that is resumed with other epochs.
        """
        lr = config.lr * min(1.0, (update + 1) / max(1, self.warmup))
        updates_per_step = config.minibatches * self.epochs
        if self.schedule != "constant" and update >= self.warmup:
            after, length = (s * updates_per_step - self.warmup for s in (steps_made, config.steps))
            done = min(1.0, max(0.0, after + 1) / max(1, length))
            falls = 1 - done if self.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
            lr *= self.least + (1 - self.least) * falls
        return lr * math.sqrt(sequence_ess) if self.by_ess else lr


def parameter_groups(model: nn.Module, head: nn.Module | None, head_lr: float) -> list[dict[str, Any]]:
    """AdamW's groups: what is trained of the model, and the value head, if any; `scale` is of the learning rate."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    of_head = [] if head is None else [{"params": list(head.parameters()), "scale": head_lr}]
    return [{"params": trained, "scale": 1.0}, *of_head]
