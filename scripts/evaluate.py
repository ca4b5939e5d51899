"""Sample held-out problems with a model, and train nothing: `python scripts/evaluate.py MODEL --eval-samples 8`.

MODEL is a folder, a Hugging Face name, `tiny`, `smollm2`, or a run, runs/NAME, of which it takes the newest checkpoint
and the options of sampling. The engine is a run's, and gets its weights as a run's does; what follows MODEL is options
of train_async.py.
"""

import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import tyro

from asyncrl.cluster.processes import run_job
from asyncrl.cluster.streams import keep_printing
from asyncrl.config import (
    OPTIONS,
    ChangeableBy,
    Config,
    flag,
    nearest,
    options_changeable_by,
    with_home_folder,
)
from asyncrl.controller.evaluation import Evaluation
from asyncrl.job.command_line import check, read_options
from asyncrl.job.resume import read_resumed_options
from asyncrl.runlog.manifest import parse_step

OF_EVALUATION = (
    "model", "task", "task_args", "reward", "data_path", "max_prompt_tokens", "max_response_tokens", "temperature",
    "top_p", "top_k", "min_p", "seed", "timeout_s", "dtype", "tool_parser", "reasoning_parser",
    *(option.name for option in options_changeable_by(ChangeableBy.EVALUATION)),
)  # fmt: skip
"""Options that say what is sampled, and where. An evaluation has the others by default."""


def choose_options(model: str, words: list[str]) -> Config:
    """Return the options of an evaluation. Raises ValueError, in one line, for options that mean nothing to it."""
    allowed = [f"--{flag(name)}" for name in OF_EVALUATION[1:]]
    for word in words:
        name = word.partition("=")[0]
        if word.startswith("--") and name not in allowed:
            listed = ["--eval-samples", *allowed]
            hint = nearest(name, listed)
            raise ValueError(
                f"{word} means nothing here; an evaluation takes {', '.join(listed)}{hint}"
            )
    first_folder = next(iter(Path(model).parts[:-1]), None)
    is_path = first_folder == Config.runs_dir or (first_folder and Path(first_folder).is_dir())
    if is_path and not Path(model).exists():
        raise ValueError(
            f"{model}: no such folder; give a run, as runs/NAME, a folder with config.json and *.safetensors, or a "
            "Hugging Face name"
        )
    if (Path(model) / "run.json").exists():
        begun = read_resumed_options(Path(model))
        newest = max(Path(model).glob("checkpoints/step_*[0-9]"), key=parse_step, default=None)
        if newest is None:
            raise ValueError(f"{model} has no checkpoint; give a run that has saved one")
        config = read_options(words, replace(begun, model=str(newest)))
    else:
        config = read_options(["--model", model, *words])
    sampling = {name: OPTIONS[name].value_in(config) for name in OF_EVALUATION}
    fixed = {"steps": 1, "eval_every": 1, "groups_per_step": 1, "group_size": 2, "async_ratio": 0.0}
    return Config(**sampling | fixed, save_every=None).checked()  # an evaluation needs no room


def sample(config: Config, num_samples: int) -> Evaluation:
    """Sample each held-out problem `num_samples` times, one after the other by `member`; in one process."""
    from asyncrl.job.assemble import start_node, start_rank
    from asyncrl.job.publisher import make_publisher
    from asyncrl.trainer.policy import load_policy
    from rollout import run_worker

    with start_rank(config, trains=False) as bare_rank, start_node(bare_rank, run_worker) as rank:
        problems = rank.controller.ticket_source.prompts.eval_problems
        problems[:] = [problem for problem in problems for _ in range(num_samples)]
        policy = load_policy(rank.config, rank.model_path, rank.device, rank.clock)
        publisher = make_publisher(rank, policy)
        publisher.publish(rank.first_version)
        rank.controller.finish_evaluations()
        publisher.check_last(rank.first_version)
        return rank.controller.ended_evaluations[-1]


def describe(evaluation: Evaluation, num_samples: int) -> list[str]:
    """Return lines with mean reward, pass@1, and pass@k, arXiv 2107.03374: means over problems ± standard errors.

    A response is right where its reward is at least 1.
    """
    rewards = np.zeros(evaluation.num_asked)  # a response that failed has none
    for trajectory in evaluation.trajectories:
        if trajectory.finish_reason != "failed":
            rewards[trajectory.member] = trajectory.reward
    rewards = rewards.reshape(-1, num_samples)
    is_right = rewards >= 1
    rows = {"mean reward": rewards.mean(1), "pass@1": is_right.mean(1)}
    rows[f"pass@{num_samples}"] = is_right.max(1)
    num_failed = evaluation.failures().num_failed
    lines = [f"{len(rewards)} problems, {num_samples} samples each, {num_failed} failed"]
    for name, values in rows.items():
        error = values.std(ddof=1) / len(values) ** 0.5
        lines.append(f"{name:12}{values.mean():.3f} ± {error:.3f}")
    if rewards.mean() > 0 and not is_right.any():
        lines.append(
            f"No response is right: a right one has a reward of at least 1, the best has {rewards.max():.3g}."
        )
    return lines


@dataclass(frozen=True)
class Arguments:
    """The command line, but for options of train_async.py."""

    model: tyro.conf.Positional[str]
    """A folder, a name, or runs/NAME."""
    eval_samples: int = 1
    """Samples of each problem."""


def main() -> None:
    """Read the command line and evaluate."""
    keep_printing(BrokenPipeError)
    given, words = tyro.cli(
        Arguments,
        args=with_home_folder(sys.argv[1:]),
        description=__doc__,
        return_unknown_args=True,
    )

    def job() -> None:
        if given.eval_samples < 1:
            raise ValueError(f"--eval-samples must be at least 1, got {given.eval_samples}")
        config = choose_options(given.model, words)
        check(config)
        with tempfile.TemporaryDirectory(prefix="evaluate-", ignore_cleanup_errors=True) as folder:
            evaluation = sample(replace(config, runs_dir=folder), given.eval_samples)
        print("\n".join(describe(evaluation, given.eval_samples)), flush=True)

    run_job(job)


if __name__ == "__main__":
    main()
