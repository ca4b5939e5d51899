"""Loads the loss of --algo with its --algo-args, and tries it on six tokens before a run starts."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from algos import LOSSES, LossInputs
from algos.centering import centering_term
from algos.inputs import couples_tokens, keywords_of
from asyncrl import user_code
from asyncrl.config import Config, allowed_values, read_arguments
from asyncrl.records import DTYPES, TokenColumns

NAMES_ELSEWHERE = {
    "dapo": "--algo grpo --algo-args clip_high=0.28 --drop-zero-variance",
    "dr_grpo": "--algo grpo --advantage dr_grpo --loss-aggregation constant",
    "ppo": "--algo grpo --advantage gae, or decoupled_ppo for a clip around the proximal policy",
    "rloo": "--algo reinforce --advantage rloo",
}
"""Algorithms that are not one loss here, with the options that make them."""
RESERVED_STATS = {
    "advantage", "changed_weights", "entropy", "ess", "gradient_cosine", "grad_norm", "kl_ref", "length", "lr", "ratio",
    "ratio_max", "ratio_q01", "ratio_q99", "reward", "scale", "sequence_ess", "skipped_updates", "slope", "total",
}  # fmt: skip
"""Names of other metrics with the prefix loss/. A stat of a loss must not replace one."""
_MUST_TRAIN = {
    0.0: "fresh tokens, whose ratio is 1",
    1e-5: "tokens that only rounding has moved, by 1e-5 nats the way their advantage points",
}
"""Tokens by how far they moved, nats. A loss must train some of each. So a clip or band must be wider than the
difference of engine and trainer at one version."""


def choose_loss(config: Config) -> Callable:
    """Return the loss of a run with its arguments bound.

    Raises ValueError, in one line, for a missing loss, an object that is no function, or a wrong argument. Raises it
    too for a loss that needs one advantage per sequence, if the estimator gives one per token.
    """
    if config.algo in NAMES_ELSEWHERE:
        raise ValueError(
            f"--algo {config.algo} is no loss of this code; write {NAMES_ELSEWHERE[config.algo]}"
        )
    loss = user_code.load(config.algo, "--algo", LOSSES)
    with user_code.errors_as_value_error(config.algo, "--algo"):
        keywords = keywords_of(loss)
    if config.advantage == "gae" and hasattr(loss, "needs_equal_advantages"):
        raise ValueError(
            f"--algo {config.algo} needs one advantage for all tokens of a response, and --advantage gae gives each "
            "its own; take another --advantage, as grpo, or a loss that weighs tokens one by one, as tis_ppo"
        )
    arguments = read_arguments("algo-args", config.algo_args, f"--algo {config.algo}", keywords)
    bound = functools.partial(loss, **arguments)
    if config.centering and (couples_tokens(loss) or reads_sequences(bound)):
        raise ValueError(
            f"--algo {config.algo} weighs whole sequences or updates, and --centering needs a weight per token; take "
            "another loss, as tis, or leave --centering out"
        )
    return bound


def describe(algo: str) -> str:
    """Return a line about a loss, then its keyword arguments with their defaults and ranges."""
    loss = user_code.load(algo, "--algo", LOSSES)
    # A file of algos/ has one loss and describes it at its top. A user's file can have several.
    own_text = "" if loss.__module__.startswith("algos.") else inspect.getdoc(loss)
    text = own_text or inspect.getmodule(loss).__doc__ or ""
    summary = text.strip().splitlines()[0] if text else "no docstring"
    rows = [
        f"  {f'{keyword.name}={keyword.default}':28}{allowed_values(keyword.annotation)}".rstrip()
        for keyword in keywords_of(loss)
    ]
    return "\n".join(
        [f"--algo {algo}: {summary}", "", "--algo-args, NAME=VALUE each:", *(rows or ["  none"])]
    )


def try_loss(loss: Callable, num_top: int = 0, is_centered: bool = False) -> None:
    """Compute a loss on six tokens of a good and a bad sequence: stale tokens, then the tokens of _MUST_TRAIN.

    The tokens have the `num_top` likeliest tokens of --top-logprobs. If the loss `is_centered`, compute its centering
    term, too.

    Raises TypeError unless it returns a loss and stats for each token. Raises ValueError for a stat with the name of
    another metric. Raises it too for tokens of _MUST_TRAIN without a finite gradient. Passes on errors of the loss.
    """
    logprobs = torch.linspace(-2, -0.1, 6).requires_grad_()
    output = _call(loss, _six_tokens(logprobs, 0.1, num_top))
    has_parts = isinstance(output, tuple) and len(output) == 2 and isinstance(output[1], dict)
    columns = [output[0], *output[1].values()] if has_parts else [None]
    if any(not isinstance(column, Tensor) or column.shape != (6,) for column in columns):
        raise TypeError(
            f"give (per_token_loss [N], stats: dict of tensors [N]); for N = 6 tokens the loss gave {output}"
        )
    taken = RESERVED_STATS & output[1].keys()
    if taken:
        raise ValueError(
            f"its stats have the names of other metrics, loss/{', loss/'.join(sorted(taken))}; give other names"
        )
    if not output[0].requires_grad:
        raise TypeError(
            "per_token_loss carries no gradient; make it of inputs.logprobs, not detached"
        )
    for moved, which in _MUST_TRAIN.items():
        losses = _call(loss, _six_tokens(logprobs, moved, num_top))[0]
        (slopes,) = torch.autograd.grad(losses.sum(), logprobs)
        if not (losses.isfinite().all() and slopes.isfinite().all() and slopes.any()):
            got = f"the losses {losses.tolist()} and the gradient {slopes.tolist()}"
            raise ValueError(f"{which}, have {got}: nothing would be trained; take other arguments")
    if is_centered:
        head = logprobs.detach()[:, None]
        centering_term(loss, _six_tokens(logprobs, 0.1, num_top), head, head)


def reads_sequences(loss: Callable) -> bool:
    """Return whether a loss reads the bounds of sequences, as a ratio per sequence does.

    The loss is computed on six tokens without `sequence_ids`. `try_loss` has computed it with them.
    """
    tokens = _six_tokens(torch.linspace(-2, -0.1, 6).requires_grad_(), 0.1, num_top=1)
    try:
        _call(loss, replace(tokens, sequence_ids=None))
    except Exception:  # foreign code may raise anything
        return True
    return False


def _call(loss: Callable, inputs: LossInputs) -> Any:
    """Call a loss on the inputs of a whole update."""
    update = replace(inputs, logprobs=inputs.logprobs.detach())
    return loss(inputs, update) if couples_tokens(loss) else loss(inputs)


def _six_tokens(logprobs: Tensor, moved: float, num_top: int) -> LossInputs:
    """Return inputs whose good tokens have become likelier by `moved`, nats, and whose bad ones less likely.

    Columns of real numbers hold log-probs, and other columns zeros.
    """
    ids, held = torch.tensor([0, 0, 0, 0, 1, 1]), logprobs.detach()
    advantages = 1.0 - 2 * ids
    log_ratio = moved * advantages
    behavior_logprobs = held - log_ratio
    columns = {}
    for column in fields(TokenColumns):
        values = behavior_logprobs * (DTYPES[column.name].kind == "f")
        if "is_wide" not in column.metadata:
            columns[column.name] = values
        elif num_top:
            columns[column.name] = values[:, None].expand(-1, num_top)
    return LossInputs(
        logprobs,
        behavior_logprobs,
        held - log_ratio / 2,
        advantages=advantages,
        rewards=1.0 - ids,
        sequence_ids=ids,
        lags=ids,
        columns=columns,
    )
