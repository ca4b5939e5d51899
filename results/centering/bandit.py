"""Bias of a loss's gradient on stale data with and without score centering, in closed form.

    PYTHONPATH=. .venv/bin/python results/centering/bandit.py

An arm has T tokens, and each is one of V with its own softmax. The reward is 1 if at least half of the tokens are
token 0. The policy makes exact gradient steps. Its newest weights are trained on the arms of weights that are `lag`
steps older. The advantage is the reward less the mean reward of these older weights. Sums over all V^T arms replace
sampling. So the only spread is that of the random starts. results/bandit has all losses, without centering.
"""

import itertools
import json
import math
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from algos import LOSSES, LossInputs
from algos.centering import centering_term
from scripts.lines import markdown, provenance

FOLDER = Path(__file__).parent
NAMES = ("reinforce", "grpo", "tis", "dppo")
LAGS = (0, 1, 4, 16)
NUM_CHOICES = 4
NUM_STARTS = 20
HEADS = (0, 2, NUM_CHOICES)
"""Sizes of the head: no centering, a head with a tail, and the whole vocabulary."""


def token_logprobs(logits: Tensor, arms: Tensor) -> Tensor:
    """Return the log-prob of each token of each arm, [V^T, T] float64 nats. Logits are [T, V]."""
    return logits.log_softmax(-1)[torch.arange(arms.shape[1]), arms]


def true_gradient(logits: Tensor, arms: Tensor, rewards: Tensor) -> Tensor:
    """Return the gradient of the mean reward, [T, V]: π(v) · (E[R | v] − E[R]) for each token v."""
    probs = token_logprobs(logits, arms).sum(1).exp()
    earned = torch.einsum("a,atv->tv", probs * rewards, one_hot(arms, NUM_CHOICES).double())
    return earned - logits.softmax(-1) * (probs @ rewards)


def policies(num_updates: int, arms: Tensor, rewards: Tensor, seed: int) -> list[Tensor]:
    """Return the logits [T, V] after 0 … num_updates exact gradient steps of size 1 from a random start."""
    generator = torch.Generator().manual_seed(seed)
    path = [torch.randn(arms.shape[1], NUM_CHOICES, generator=generator, dtype=torch.float64)]
    for _ in range(num_updates):
        path.append(path[-1] + true_gradient(path[-1], arms, rewards))
    return path


def mean_gradient(
    name: str, head: int, current: Tensor, behavior: Tensor, arms: Tensor, rewards: Tensor
) -> Tensor:
    """Return the negative mean gradient of a loss to the logits, [T, V], over all arms of the policy `behavior`."""
    num_tokens = arms.shape[1]
    probs = token_logprobs(behavior, arms).sum(1).exp()
    logits = current.expand(len(arms), -1, -1).clone().requires_grad_()
    distributions = logits.log_softmax(-1)
    logprobs = distributions.gather(2, arms[..., None]).flatten()
    advantages = (rewards - probs @ rewards).repeat_interleave(num_tokens)
    inputs = LossInputs(
        logprobs=logprobs,
        behavior_logprobs=token_logprobs(behavior, arms).flatten(),
        proximal_logprobs=logprobs.detach(),
        advantages=advantages,
        rewards=rewards.repeat_interleave(num_tokens),
        sequence_ids=torch.arange(len(arms)).repeat_interleave(num_tokens),
    )
    losses, _ = LOSSES[name](inputs)
    if head:
        likeliest = behavior.log_softmax(-1).topk(head, dim=1)
        ids = likeliest.indices.expand(len(arms), -1, -1)
        head_logprobs = distributions.gather(2, ids).flatten(0, 1)
        behavior_head = likeliest.values.expand(len(arms), -1, -1).flatten(0, 1)
        losses = losses + centering_term(LOSSES[name], inputs, head_logprobs, behavior_head)[0]
    (gradients,) = torch.autograd.grad(losses.sum(), logits)
    return -torch.einsum("a,atv->tv", probs, gradients)


def study() -> list[dict]:
    """Return a record per length, loss, head, lag and start: bias and cosine of the mean gradient."""
    records = []
    for num_tokens, seed in itertools.product((1, 4), range(NUM_STARTS)):
        arms = torch.tensor(list(itertools.product(range(NUM_CHOICES), repeat=num_tokens)))
        rewards = ((arms == 0).sum(1) >= math.ceil(num_tokens / 2)).double()
        path = policies(max(LAGS), arms, rewards, seed)
        true = true_gradient(path[-1], arms, rewards).flatten()
        for name, head, lag in itertools.product(NAMES, HEADS, LAGS):
            mean = mean_gradient(name, head, path[-1], path[-1 - lag], arms, rewards).flatten()
            cosine = mean @ true / (mean.norm() * true.norm()).clamp(min=1e-300)
            case = {"tokens": num_tokens, "algo": name, "head": head, "lag": lag, "seed": seed}
            bias = float((mean - true).norm() / true.norm())
            records.append(case | {"bias": bias, "cosine": float(cosine)})
    return records


def table(records: list[dict]) -> list[str]:
    """Return the lines of the table: mean and standard deviation of the bias, and the mean cosine."""
    cells = pd.DataFrame(records).groupby(["tokens", "algo", "head", "lag"], sort=False)
    rows = []
    for (num_tokens, name, head), group in itertools.groupby(cells, lambda cell: cell[0][:3]):
        texts = []
        for _, runs in group:
            bias, spread, cosine = runs["bias"].mean(), runs["bias"].std(), runs["cosine"].mean()
            texts.append(f"{bias:.2f} ± {spread:.2f}, {cosine:.2f}")
        rows.append([num_tokens, f"`{name}`", {0: "off", 2: "K = 2"}.get(head, "exact"), *texts])
    return markdown(["T", "loss", "centering", *(f"lag {lag}" for lag in LAGS)], rows)


def main() -> None:
    """Write bandit.jsonl and bandit.md, and print the table."""
    torch.set_num_threads(1)
    records = study()
    lines = [json.dumps(line) + "\n" for line in (provenance() | {"n": NUM_STARTS}, *records)]
    (FOLDER / "bandit.jsonl").write_text("".join(lines), encoding="utf-8")
    caption = (
        f"‖E[g] − ∇J‖ / ‖∇J‖, mean ± standard deviation over {NUM_STARTS} random starts, then the cosine of E[g] and "
        "∇J. T is the number of tokens of an arm."
    )
    page = "\n".join([*table(records), "", caption]) + "\n"
    (FOLDER / "bandit.md").write_text(page, encoding="utf-8")
    print(page)


if __name__ == "__main__":
    main()
