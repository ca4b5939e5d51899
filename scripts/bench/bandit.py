"""Bias and variance of every loss's gradient on stale data, in closed form: `python scripts/bench/bandit.py`.

A tabular bandit: an arm is a sequence of T tokens, each one of V and drawn from a softmax of its own, so the policy is
a table of logits [T, V]. Reward 1 for an arm with at least ⌈T/2⌉ tokens equal to the target's, else 0; the best policy
always plays the target and earns J = 1. The true gradient of J at logits (t, v), with π_t(v) the token's probability:

    ∂J/∂θ(t, v) = π_t(v)·(E[R | token t = v] − J)

The policy takes exact gradient steps. Its last one is trained on arms that the policy `lag` updates earlier sampled;
the advantage is the reward minus that policy's own mean reward (a group's mean, without its noise). Means and variances
of one arm's gradient are sums over all V^T arms, weighted by their probability: nothing is sampled, so the only error
is between the random starts. With T > 1 a token's ratio is a part of the arm's only, which biases each loss that weighs
tokens one by one. The reference is `sequence_is`. A loss that couples all tokens of an update is left out.
"""

import argparse
import itertools
import json
import math
from pathlib import Path

import pandas
import torch
from matplotlib.figure import Figure
from torch import Tensor

from algos import LOSSES, LossInputs
from algos.inputs import couples_tokens
from scripts.bench.harness import ROOT, provenance
from scripts.lines import markdown, read

MEASURES = {
    "bias": ("‖E[g] − ∇J‖ / ‖∇J‖", ".2f"),
    "std": ("√tr Cov[g] / ‖∇J‖ of one arm", ".1f"),
    "cosine": ("cos(E[g], ∇J)", ".2f"),
}
"""What is measured of a loss's negative gradient g: its formula, and how it is shown."""
SHOWN_LAGS = (0, 1, 2, 4, 8, 16)
ROWS = tuple(algo for algo, loss in LOSSES.items() if not couples_tokens(loss))
"""What is measured: every loss that gives an arm the same gradient whatever the others are."""


def all_arms(num_tokens: int, num_choices: int) -> tuple[Tensor, Tensor]:
    """Return every arm, [V^T, T] int64, and its reward, [V^T] float64; the target is token 0 everywhere."""
    arms = torch.tensor(list(itertools.product(range(num_choices), repeat=num_tokens)))
    rewards = (arms == 0).sum(dim=1) >= math.ceil(num_tokens / 2)
    return arms, rewards.double()


def token_logprobs(logits: Tensor, arms: Tensor) -> Tensor:
    """Log-prob of each token of each arm, [V^T, T] nats, under logits [T, V]."""
    return logits.log_softmax(dim=-1)[torch.arange(arms.shape[1]), arms]


def mean_reward(logits: Tensor, arms: Tensor, rewards: Tensor) -> Tensor:
    """J: expected reward of the policy, a scalar."""
    return (token_logprobs(logits, arms).sum(dim=1).exp() * rewards).sum()


def true_gradient(logits: Tensor, arms: Tensor, rewards: Tensor) -> Tensor:
    """∂J/∂logits, [T, V], by the closed form above."""
    probs = token_logprobs(logits, arms).sum(dim=1).exp()
    one_hot = torch.nn.functional.one_hot(arms, logits.shape[1]).double()
    earned = torch.einsum("a,atv->tv", probs * rewards, one_hot)  # π_t(v)·E[R | token t = v]
    return earned - logits.softmax(dim=-1) * (probs * rewards).sum()


def policies(
    num_updates: int, num_choices: int, lr: float, arms: Tensor, rewards: Tensor, seed: int
) -> list[Tensor]:
    """Logits [T, V] after 0 … num_updates exact gradient steps from a random start."""
    generator = torch.Generator().manual_seed(seed)
    path = [torch.randn(arms.shape[1], num_choices, generator=generator, dtype=torch.float64)]
    for _ in range(num_updates):
        path.append(path[-1] + lr * true_gradient(path[-1], arms, rewards))
    return path


def arm_gradients(
    algo: str, current: Tensor, behavior: Tensor, arms: Tensor, rewards: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the negative gradient of the loss `algo` for each arm, [V^T, T, V], and the arms' probabilities, [V^T].

    Arms come from the policy `behavior` and are trained on at `current` (logits [T, V]), which is the proximal policy
    too: this is the first update of a step. Losses of an arm's tokens are summed.
    """
    num_tokens = arms.shape[1]
    logprobs = token_logprobs(current, arms).flatten().requires_grad_()
    behavior_logprobs = token_logprobs(behavior, arms)
    advantages = rewards - mean_reward(behavior, arms, rewards)
    inputs = LossInputs(
        logprobs=logprobs,
        behavior_logprobs=behavior_logprobs.flatten(),
        proximal_logprobs=logprobs.detach(),
        advantages=advantages.repeat_interleave(num_tokens),
        rewards=rewards.repeat_interleave(num_tokens),
        sequence_ids=torch.arange(len(arms)).repeat_interleave(num_tokens),
    )
    (slopes,) = torch.autograd.grad(LOSSES[algo](inputs)[0].sum(), logprobs)
    # ∂ log π_t(token) / ∂θ(t, v) = [token = v] − π_t(v)
    scores = torch.nn.functional.one_hot(arms, current.shape[1]) - current.softmax(dim=-1)
    return -slopes.view(-1, num_tokens, 1) * scores, behavior_logprobs.sum(dim=1).exp()


def measure(gradients: Tensor, probs: Tensor, true: Tensor) -> dict[str, float]:
    """The MEASURES of gradients [V^T, T, V] of arms with probabilities [V^T], against the true one [T, V]."""
    flat, true = gradients.flatten(1), true.flatten()
    mean = probs @ flat
    variance = (probs @ flat.square().sum(dim=1) - mean.square().sum()).clamp(min=0)
    return {
        "bias": float((mean - true).norm() / true.norm()),
        "std": float(variance.sqrt() / true.norm()),
        "cosine": float(mean @ true / (mean.norm() * true.norm()).clamp(min=1e-300)),
    }


def token_drift(current: Tensor, behavior: Tensor) -> float:
    """KL(behavior ‖ current) in nats per token, exact."""
    probs, log_ratio = (
        behavior.softmax(dim=-1),
        behavior.log_softmax(dim=-1) - current.log_softmax(dim=-1),
    )
    return float((probs * log_ratio).sum(dim=-1).mean())


def study(
    num_tokens: int, num_choices: int, max_lag: int, num_starts: int, lr: float
) -> list[dict]:
    """One record per loss and lag: the MEASURES and the drift, each as mean and standard deviation over the starts."""
    arms, rewards = all_arms(num_tokens, num_choices)
    found = []
    for seed in range(num_starts):
        path = policies(max_lag, num_choices, lr, arms, rewards, seed)
        true = true_gradient(path[-1], arms, rewards)
        for lag, algo in itertools.product(range(max_lag + 1), ROWS):
            values = measure(*arm_gradients(algo, path[-1], path[-1 - lag], arms, rewards), true)
            drift = token_drift(path[-1], path[-1 - lag])
            found.append({"tokens": num_tokens, "algo": algo, "lag": lag, **values, "drift": drift})
    starts = pandas.DataFrame(found).groupby(["tokens", "algo", "lag"], sort=False)
    spreads = starts.std().dropna(axis=1).add_suffix("_sd")
    return starts.mean().join(spreads).reset_index().to_dict("records")


def by_lag(records: list[dict], num_tokens: int, name: str) -> pandas.DataFrame:
    """Means over the starts of what `name` is a key of: a row per loss, a column per lag."""
    of_length = [record for record in records if record.get("tokens") == num_tokens]
    return pandas.DataFrame(of_length).pivot(index="algo", columns="lag", values=name).loc[[*ROWS]]


def table(records: list[dict], num_tokens: int, name: str) -> list[str]:
    """Markdown lines of one measure for one arm length: a row per loss, a column for each lag that is shown."""
    frame = by_lag(records, num_tokens, name)
    lags = [lag for lag in SHOWN_LAGS if lag in frame]
    drift = by_lag(records, num_tokens, "drift")[lags].iloc[0].map("*{:.3f}*".format)
    cells = frame[lags].map(f"{{:{MEASURES[name][1]}}}".format).rename("`{}`".format)
    rows = [["*drift, nats per token*", *drift], *cells.reset_index().to_numpy().tolist()]
    return markdown([f"{name}, T = {num_tokens}", *(f"lag {lag}" for lag in lags)], rows)


def draw(records: list[dict], lengths: list[int], path: Path) -> None:
    """Write the figure: a row per arm length, a column per measure, a line per loss over the lag."""
    figure = Figure(figsize=(13, 4 * len(lengths)), layout="constrained")
    panels = figure.subplots(len(lengths), len(MEASURES), squeeze=False)
    # Several losses lie on each other: dashes of different phase let all of them show.
    styles = [f"C{i % 10}{('-', '--', '-.', ':')[i % 4]}" for i, _ in enumerate(ROWS)]
    for panel, (num_tokens, name) in zip(
        panels.flat, itertools.product(lengths, MEASURES), strict=True
    ):
        by_lag(records, num_tokens, name).T.plot(ax=panel, style=styles, legend=False, grid=True)
        panel.set(xlabel="lag, updates", title=f"{MEASURES[name][0]},  T = {num_tokens}")
        if name != "cosine":
            panel.set_yscale("symlog", linthresh=0.1 if name == "bias" else 1)
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=6)
    figure.savefig(path, dpi=110)


def write(out: Path) -> None:
    """Write bandit.png and README.md from bandit.jsonl, whose first line says what made it."""
    made, *records = read(out / "bandit.jsonl")
    lengths = sorted({record["tokens"] for record in records})
    draw(records, lengths, out / "bandit.png")
    text = [
        "# Which gradient survives stale data: a tabular softmax bandit",
        f"`{made['command']}`: commit {made['commit']}; {made['hardware']}; torch {made['packages']['torch']}; "
        f"n = {made['n']} random starts, {made['choices']} choices per token, lr {made['lr']}; every loss with "
        "its default options, but without `m2po`, which couples all tokens of an update: an arm has no gradient of its "
        "own.",
        "Means over the starts (their standard deviations are in `bandit.jsonl`) of "
        + "; ".join(f"{name}, {formula}" for name, (formula, _) in MEASURES.items())
        + ". What is computed, and how exactly, is on top of `scripts/bench/bandit.py`.",
        "The policy moves here by exact gradient steps, every arm the way its advantage points, and that is the way "
        "the clips cut: clipped losses, above all `gspo` with its narrow range, look worse than in noisy training.",
        *("\n".join(table(records, *of)) for of in itertools.product(lengths, MEASURES)),
        "![bias, standard deviation and cosine over the lag](bandit.png)",
    ]
    (out / "README.md").write_text("\n\n".join(text) + "\n", encoding="utf-8")


def main() -> None:
    """Read the command line, study each arm length, and write records, tables and figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--tokens", type=int, nargs="+", default=[1, 4], help="tokens per arm (T)")
    add("--choices", type=int, default=4, help="choices per token (V)")
    text = "updates between sampling and training, at most"
    add("--max-lag", type=int, default=16, help=text)
    add("--starts", type=int, default=20, help="random starts (n)")
    add("--lr", type=float, default=1.0, help="step size of the exact gradient steps")
    add("--out", type=Path, default=ROOT / "results/bandit", help="folder of the records")
    text = "study nothing, write tables and figure again"
    add("--report", action="store_true", help=text)
    given = parser.parse_args()
    torch.set_num_threads(1)
    given.out.mkdir(parents=True, exist_ok=True)
    if not given.report:
        sizes = {"n": given.starts, "lr": given.lr, "choices": given.choices}
        lines = [provenance() | sizes]
        for num_tokens in given.tokens:
            lines += study(num_tokens, given.choices, given.max_lag, given.starts, given.lr)
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (given.out / "bandit.jsonl").write_text(text, encoding="utf-8")
    write(given.out)
    print(f"records: {given.out}")


if __name__ == "__main__":
    main()
