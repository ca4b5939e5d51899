"""The optimizer that `--optimizer` and `--optim.args` choose, its learning rate, and its state for checkpoints."""

import copy
import inspect
import json
import math
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from asyncrl import user_code
from asyncrl.config import Config, read_arguments
from asyncrl.trainer.sharding import own_shard


class Adafactor(torch.optim.Adafactor):
    """torch's Adafactor, for one rank only."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise ValueError if several ranks share a parameter: torch would use the norm of a shard."""
        super().add_param_group(param_group)
        if any(map(_is_sharded, param_group["params"])):
            raise ValueError(
                "it trains on one rank only, because it needs norms of whole weights; use one rank, or adamw"
            )

    def step(self, closure: Callable | None = None) -> Any:
        """Make an update. Gradients are replicated DTensors first, because torch squares their norms in place."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if isinstance(parameter.grad, DTensor):
                    placements = [Replicate()] * parameter.device_mesh.ndim
                    parameter.grad = parameter.grad.redistribute(placements=placements)
        return super().step(closure)


def _is_sharded(parameter: Tensor) -> bool:
    """Return whether several ranks hold parts of a parameter."""
    return isinstance(parameter, DTensor) and parameter.device_mesh.size() > 1


# Fused kernels make no temporaries of the weights' size. Other optimizers have no fused kernels for sharded tensors.
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "adamw": partial(torch.optim.AdamW, weight_decay=0.0, fused=True),
    "adam": partial(torch.optim.Adam, fused=True),
    "sgd": torch.optim.SGD,
    "rmsprop": torch.optim.RMSprop,
    "adafactor": Adafactor,
}
"""Values of --optimizer, beside user code."""
_FIXED_ARGUMENTS = ("lr", "fused", "foreach", "capturable", "differentiable", "maximize")
"""Arguments of torch's optimizers that --optim.args cannot set: --lr sets one, others choose torch's kernels."""

DEFAULT_LRS = {10e6: 1e-3, 400e6: 4e-5, math.inf: 1e-6}
"""Default learning rates of Adam and AdamW, for models with fewer parameters than the key.

The first was measured with 0.12 million (docs/staleness.md), and the second with 135 million (results/smollm2). Twice
the second made replies empty (results/environments/verifiers.toml). The third is the default of TRL's GRPOConfig."""
MAX_COMPARED = 1 << 20
"""About how many weights of a rank are compared before and after an update. To compare all halves the speed of the
optimizer on a CPU (WORKLOG.md)."""
LORA_FACTOR = 10
"""Learning rate of adapters, divided by that of full weights: https://thinkingmachines.ai/blog/lora."""
MAX_LR_FACTOR = 10
"""Largest learning rate without a warning, divided by the default."""


def choose_lr(config: Config, num_parameters: int) -> tuple[Config, str]:
    """Return the options with a learning rate for a model of `num_parameters`, and a line about it.

    Adam and AdamW move each weight by about the learning rate, for any gradient. Other optimizers do not, so they have
    no default. Raises ValueError if --lr is missing for one of them.
    """
    if config.optimizer not in ("adamw", "adam"):
        if config.lr is None:
            raise ValueError(
                f"--optimizer {config.optimizer} needs --lr: its default is for adamw and adam; add --lr"
            )
        return config, f"lr: {config.lr:g}"
    fitting = next(lr for limit, lr in DEFAULT_LRS.items() if num_parameters < limit)
    if config.lora_rank:
        fitting *= LORA_FACTOR
    size = f"{num_parameters:,} parameters{' below adapters' * (config.lora_rank > 0)}"
    if config.lr is None:
        return replace(config, lr=fitting), f"lr: {fitting:g}, the default for {size}"
    if config.lr > MAX_LR_FACTOR * fitting * (1 + 1e-9):
        return config, (
            f"warning: --lr {config.lr:g} is {config.lr / fitting:.0f} times {fitting:g}, which fits {size}; the "
            "model may forget all it knows within a few steps; leave --lr out, or lower it"
        )
    return config, f"lr: {config.lr:g}"


def learning_rate(
    config: Config, update: int, steps_made: float, sequence_ess: float = 1.0
) -> float:
    """Return the learning rate of update number `update` ≥ 0.

    `sequence_ess` is the effective sample size of its sequences, 0–1. Without --optim.scale-lr-by-ess it is 1.
    `steps_made` counts the run's steps before it, and the fraction of the current step. A schedule follows that count.
    So it ends with the run, also if a resume changed the epochs.
    """
    optim = config.optim
    lr = config.lr * min(1.0, (update + 1) / max(1, optim.warmup_steps))
    updates_per_step = config.minibatches * optim.epochs
    if optim.lr_scheduler != "constant" and update >= optim.warmup_steps:
        updates_after_warmup = steps_made * updates_per_step - optim.warmup_steps
        length = config.steps * updates_per_step - optim.warmup_steps
        share_done = min(1.0, max(0.0, updates_after_warmup + 1) / max(1, length))
        decay = (
            1 - share_done
            if optim.lr_scheduler == "linear"
            else (1 + math.cos(math.pi * share_done)) / 2
        )
        lr *= optim.min_lr_ratio + (1 - optim.min_lr_ratio) * decay
    return lr * math.sqrt(sequence_ess)


def parameter_groups(
    config: Config, model: nn.Module, head: nn.Module | None
) -> list[dict[str, Any]]:
    """Return the optimizer's groups: the trained weights, and the value head, if any, with another learning rate."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [{"params": trained, "lr": config.lr}]
    if head is not None:
        head_lr = config.lr * config.advantage_options.value_lr
        groups.append({"params": list(head.parameters()), "lr": head_lr})
    return groups


def make_optimizer(config: Config, groups: list[dict[str, Any]]) -> Optimizer:
    """Make the optimizer of --optimizer, with its arguments from `--lr` and `--optim.args`. Betas are beta1, beta2 …

    Raises ValueError, in one line, for an unknown argument, and if the optimizer refuses its arguments.
    """
    make = user_code.load(config.optimizer, "--optimizer", OPTIMIZERS)
    with user_code.errors_as_value_error(config.optimizer, "--optimizer"):
        # The first parameter is the groups.
        _, *parameters = inspect.signature(make, eval_str=True).parameters.values()
    defaults = {parameter.name: parameter.default for parameter in parameters}
    betas = [
        inspect.Parameter(f"beta{number}", inspect.Parameter.KEYWORD_ONLY, default=beta)
        for number, beta in enumerate(defaults.get("betas", ()), 1)
    ]
    options = [
        parameter
        for parameter in parameters
        if parameter.name not in _FIXED_ARGUMENTS and not isinstance(parameter.default, tuple)
    ]
    owner = f"--optimizer {config.optimizer}"
    arguments = read_arguments("optim.args", config.optim.args, owner, [*options, *betas])
    if betas:
        arguments["betas"] = tuple(arguments.pop(beta.name, beta.default) for beta in betas)
    if "lr" in defaults:
        arguments["lr"] = config.lr
    with user_code.errors_as_value_error(config.optimizer, "--optimizer"):
        optimizer = make(groups, **arguments)
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                f"it made a {type(optimizer).__name__}; give a function that makes a torch.optim.Optimizer"
            )
    return optimizer


def step_and_count_changes(optimizer: Optimizer, parameters: list[Tensor]) -> Tensor:
    """Make an update. Return how many compared weights it changes in bfloat16, and how many not, [2] float64."""
    before = _compared_weights(parameters)
    optimizer.step()
    is_changed = _compared_weights(parameters) != before
    return torch.stack([is_changed.sum(), (~is_changed).sum()]).double()


@torch.no_grad()
def _compared_weights(parameters: list[Tensor]) -> Tensor:
    """Return the weights of this rank's shards, or every n-th if there are many, bfloat16.

    They are joined before they are cast. So a GPU runs a few kernels for all parameters, and not a few for each.
    """
    shards = [own_shard(parameter).flatten() for parameter in parameters]
    # It is odd, because an even one would miss whole columns of most matrices.
    distance = sum(map(len, shards)) // MAX_COMPARED | 1
    return torch.cat([shard[::distance] for shard in shards]).to(torch.bfloat16)


def try_optimizer(config: Config) -> None:
    """Update a small matrix and read the state. Raises ValueError, in one line, if that fails."""
    matrix = nn.Parameter(torch.ones(2, 2))
    given = replace(config, lr=config.lr or 1.0)
    optimizer = make_optimizer(given, [{"params": [matrix], "lr": given.lr}])
    state = OptimizerState(optimizer, {matrix: "matrix"})
    matrix.grad = torch.ones(2, 2)
    with user_code.errors_as_value_error(config.optimizer, "--optimizer"):
        optimizer.step()
        state.tensors()
        json.dumps(state.values())
    choose_lr(config, matrix.numel())


def _check_is_shared(name: str, tensor: Tensor) -> None:
    """Raise ValueError if ranks can have different parts of a tensor without the knowledge of torch."""
    if isinstance(tensor, DTensor):
        is_shared = not any(placement.is_partial() for placement in tensor.placements)
    else:
        is_shared = tensor.ndim == 0
    if not is_shared:
        raise ValueError(
            f"--optimizer keeps {name} {list(tensor.shape)} as a part of each rank, and no checkpoint can join them; "
            "make it by torch.zeros_like(parameter), or keep a scalar that is equal on all ranks"
        )


class OptimizerState:
    """The state of any optimizer: tensors and plain values of each parameter and each group, without options."""

    def __init__(self, optimizer: Optimizer, names: dict[Tensor, str]):
        """Take a new optimizer, before its first update, and the names of all its parameters."""
        self.optimizer, self.names = optimizer, names
        self._initial_options = [
            {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors by name, live and sharded. Raises ValueError for one that only one rank has."""
        tensors = {
            f"{key}.{owner}": value.detach()
            for owner, values in self._state_by_owner().items()
            for key, value in values.items()
            if isinstance(value, Tensor)
        }
        if any(map(_is_sharded, self.names)):
            for name, tensor in tensors.items():
                _check_is_shared(name, tensor)
        return tensors

    def values(self) -> dict[str, dict[str, Any]]:
        """Return all other state by owner: a parameter's values, and a group's values that updates have changed."""
        return {
            owner: {key: value for key, value in values.items() if not isinstance(value, Tensor)}
            for owner, values in self._state_by_owner().items()
        }

    def _state_by_owner(self) -> dict[str, dict[str, Any]]:
        """Return the state of each parameter, by its name, and of each group, by its number."""
        owners = {
            self.names[parameter]: values for parameter, values in self.optimizer.state.items()
        }
        for number, (group, first) in enumerate(
            zip(self.optimizer.param_groups, self._initial_options, strict=True)
        ):
            # The trainer sets `lr` at each update. Values that updates keep are options: a resume can change them.
            owners[f"group_{number}"] = {
                key: value
                for key, value in group.items()
                if key not in ("params", "lr")
                and (isinstance(value, Tensor) or first.get(key) != value)
            }
        return owners

    def make_tensors(self, owners: Collection[str]) -> None:
        """Make the tensors of the parameters with these names, by an update that the caller undoes."""
        for parameter, name in self.names.items():
            parameter.grad = torch.zeros_like(parameter) if name in owners else None
        self.optimizer.step()
        self.optimizer.zero_grad()

    def set_values(self, values: dict[str, dict[str, Any]]) -> None:
        """Set the state that `values` returned."""
        for parameter, name in self.names.items():
            if name in values:
                self.optimizer.state[parameter].update(values[name])
        for number, (group, first) in enumerate(
            zip(self.optimizer.param_groups, self._initial_options, strict=True)
        ):
            group.update(copy.deepcopy(first) | values[f"group_{number}"])
