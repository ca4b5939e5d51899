"""Sample held-out problems with a model, without training: `python scripts/evaluate.py MODEL --eval-samples 8`.

MODEL is a folder, a Hugging Face name, `tiny`, `smollm2`, a run, or a checkpoint of a run. The folder runs/NAME stands
for its newest checkpoint. From a run it takes the options of sampling, too. The engine is a run's, and gets its weights
as a run's does. Words behind MODEL are options of train_async.py. `--out FILE` keeps every response.
"""

import math
import sys
import tempfile
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path

import msgspec
import numpy as np
import tyro

from asyncrl.cluster.processes import run_job
from asyncrl.cluster.streams import keep_printing
from asyncrl.config import (
    OPTIONS,
    Config,
    flag_of,
    nearest,
    with_home_folder,
)
from asyncrl.controller.evaluation import Evaluation
from asyncrl.job.choices import try_choices
from asyncrl.job.command_line import read_options
from asyncrl.job.resume import read_resumed_options
from asyncrl.runlog.manifest import parse_step
from asyncrl.runlog.plain import encode
from asyncrl.runlog.samples import describe_trajectory

OF_EVALUATION = (
    "model", "task", "task_args", "reward", "data_path", "max_prompt_tokens", "max_response_tokens", "max_turn_tokens",
    "temperature", "top_p", "top_k", "min_p", "seed", "timeout_s", "dtype", "tool_parser", "reasoning_parser",
    "env_timeout_s", "batch_invariant", "eval_problems", "num_rollout_workers", "rollout_tp", "max_running_requests",
    "weight_sync", "gpu_memory_utilization",
)  # fmt: skip
"""Options of what is sampled, and on which devices. An evaluation has the other ones by default."""


def choose_options(model: str, words: list[str]) -> Config:
    """Return the options of an evaluation. Raises ValueError, in one line, for options that it cannot use."""
    allowed = [flag_of(name) for name in OF_EVALUATION[1:]]
    for word in words:
        name = word.partition("=")[0]
        if word.startswith("--") and name not in allowed:
            listed = ["--eval-samples", "--right-from", "--out", *allowed]
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
    run = run_of(Path(model))
    if run is None:
        config = read_options(["--model", model, *words])
    else:
        checkpoint = Path(model)
        if run == checkpoint:
            saved = run.glob("checkpoints/step_*[0-9]")
            checkpoint = max(saved, key=parse_step, default=None)
        if checkpoint is None:
            raise ValueError(f"{model} has no checkpoint; give a run that has saved one")
        begun = read_resumed_options(run)
        # A run without workers had remote hosts.
        num_workers = begun.num_rollout_workers or None
        begun = replace(begun, model=str(checkpoint), num_rollout_workers=num_workers)
        config = read_options(words, begun)
    sampling = {name: OPTIONS[name].value_in(config) for name in OF_EVALUATION}
    fixed = {"steps": 1, "eval_every": 1, "groups_per_step": 1, "group_size": 2, "async_ratio": 0.0}
    fixed["max_tokens_per_microbatch"] = config.max_sequence_tokens
    return Config(**sampling | fixed, save_every=None).checked()  # an evaluation needs no room


def run_of(path: Path) -> Path | None:
    """Return the run at a path, or the run of the checkpoint at the path; None if there is no such run."""
    folders = [path, path.parent.parent] if path.parent.name == "checkpoints" else [path]
    return next((folder for folder in folders if (folder / "run.json").exists()), None)


def sample(config: Config, num_samples: int) -> tuple[Evaluation, list[dict]]:
    """Sample each held-out problem `num_samples` times, one after the other by `member`; in one process.

    Returns the evaluation, and a row for each response.
    """
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
        evaluation = rank.controller.ended_evaluations[-1]
        rows = []
        for response in sorted(evaluation.trajectories, key=attrgetter("member")):
            problem, repeat = divmod(response.member, num_samples)
            row = {"problem": problem, "sample": repeat}
            answer = problems[response.member].answer
            rows.append(row | describe_trajectory(response, answer, rank.tokenizer.decode))
        return evaluation, rows


def describe(evaluation: Evaluation, num_samples: int, right_from: float = 1.0) -> list[str]:
    """Return lines with mean reward and pass@k for k = 1, 2, 4 …: means over problems ± standard errors.

    A response is right if its reward is at least `right_from`.
    """
    rewards = np.full(evaluation.num_asked, np.nan)  # a failed response lacks one and is wrong
    for trajectory in evaluation.trajectories:
        if trajectory.finish_reason != "failed":
            rewards[trajectory.member] = trajectory.reward
    rewards = rewards.reshape(-1, num_samples)
    is_right = rewards >= right_from
    rewards = np.nan_to_num(rewards)
    rows = {"mean reward": rewards.mean(1)}
    powers = [2**exponent for exponent in range(num_samples.bit_length())]
    for k in sorted({*powers, num_samples}):
        rows[f"pass@{k}"] = pass_at(k, is_right.sum(1), num_samples)
    num_failed = evaluation.failures().num_failed
    what = f"{len(rewards)} problems, {num_samples} samples each, {num_failed} failed"
    limit = f"right: a reward of at least {right_from:g}"
    lines = [f"{what}; {limit}; ± is the standard error over problems"]
    for name, values in rows.items():
        lines.append(f"{name:12}{values.mean():.3f}")
        if len(values) > 1:
            lines[-1] += f" ± {values.std(ddof=1) / len(values) ** 0.5:.3f}"
    if rewards.mean() > 0 and not is_right.any():
        lines.append(
            f"No response is right: a right one has a reward of at least {right_from:g}, the best has "
            f"{rewards.max():.3g}; --right-from sets another limit."
        )
    return lines


def pass_at(k: int, num_right: np.ndarray, num_samples: int) -> np.ndarray:
    """Return each problem's chance that one of k samples is right, [P] float64, without bias (arXiv 2107.03374).

    `num_right` [P] int64 counts the right ones of num_samples.
    """
    draws = math.comb(num_samples, k)
    num_wrong = num_samples - num_right
    return np.array([1 - math.comb(int(wrong), k) / draws for wrong in num_wrong])


@dataclass(frozen=True)
class Arguments:
    """The command line, but for options of train_async.py."""

    model: tyro.conf.Positional[str]
    """A folder, a name, or runs/NAME."""
    eval_samples: int = 1
    """Samples of each problem."""
    right_from: float = 1.0
    """Least reward of a right response in pass@k."""
    out: Path | None = None
    """New file for the responses, a line of JSON each: prompt, response, reward, and the answer if there is one. The
    printed lines go to FILE.summary.txt beside it."""


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
        if given.out and given.out.exists():
            raise ValueError(f"--out {given.out} is there already; give the name of a new file")
        if given.out and not given.out.parent.is_dir():
            raise ValueError(f"--out {given.out}: its folder is missing; make it")
        config = choose_options(given.model, words)
        try_choices(config)
        with tempfile.TemporaryDirectory(prefix="evaluate-", ignore_cleanup_errors=True) as folder:
            evaluation, rows = sample(replace(config, runs_dir=folder), given.eval_samples)
        results = describe(evaluation, given.eval_samples, given.right_from)
        lines = [f"weights: {config.model}", *results]
        print("\n".join(lines), flush=True)
        if given.out:
            lines_of_rows = (encode(row, msgspec.json.encode) + b"\n" for row in rows)
            given.out.write_bytes(b"".join(lines_of_rows))  # null for NaN
            Path(f"{given.out}.summary.txt").write_text("\n".join([*lines, ""]))

    run_job(job)


if __name__ == "__main__":
    main()
