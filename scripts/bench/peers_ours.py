"""One run of ours for peers.py: train_async.py with a work's lengths, or one half of it alone on both cores.

Its one argument is what `main` takes, in JSON. Heavy imports are inside functions, as in train_async.py: every process
that is spawned imports this file.
"""

import json
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from cluster.processes import freeze_garbage
from config import Config
from scripts.bench.work import SAMPLES_PER_STEP, WORKS, run_work_worker

WARM_UP_STEPS = 5


def train(config: Config) -> list[dict]:
    """The whole job, with responses of the work's lengths. Returns its steps."""
    import train_async
    from trainer.policy import Policy

    # Weights and nothing else, as is done for TRL: a whole checkpoint would cost ours alone.
    Policy.save = lambda policy, path: save_weights(policy.named_full_parameters(), Path(path))
    train_async.train(config, run_work_worker)
    return steps_of(Path(config.runs_dir, config.run_name))


def save_weights(named: Iterable[tuple], folder: Path) -> None:
    """Write (name, tensor) of all weights into a new folder."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    save_file({name: weight.detach().clone() for name, weight in named}, folder / "model.safetensors")


def steps_of(run: Path) -> list[dict]:
    """Each step of a run: when it ended, Unix time, and what was trained in it."""
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    ends = {event["step"]: event["spans"][-1][2] for event in events if event["event"] == "step"}
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [ended(m["step"], ends[m["step"]], m["tokens/trained"]) for m in metrics]


def ended(step: int, at: float, tokens: float) -> dict:
    """A line of steps.jsonl."""
    return {"step": step, "time": at, "samples": SAMPLES_PER_STEP, "tokens": tokens}


def half_alone(mode: str, config: Config) -> list[dict]:
    """Steps of the loop without training, on two workers of one thread; or of training alone, on two threads."""
    import torch

    from scripts.bench.rig import TrainingRig, num_tokens, one_rank, running

    is_training, ends = mode == "learn", []
    half = replace(config, num_rollout_workers=1 if is_training else 2, async_ratio=2.0)
    with one_rank(), running(TrainingRig(half, Path(config.runs_dir, "half"))) as job:
        for _ in range(WARM_UP_STEPS):
            job.step()
        job.wait_until_idle()
        freeze_garbage()
        torch.set_num_threads(2 if is_training else 1)
        for step in range(1, config.steps + 1):
            groups = job.batches[step % len(job.batches)] if is_training else job.step(train=False)
            if is_training:
                job.train(groups)
            ends.append(ended(step, time.time(), num_tokens(groups)))
    return ends


def main(mode: str, work: str, steps: int, out: str, snapshot_every: int = 0, **options) -> None:
    """Write steps.jsonl into the folder `out`. `mode`: train, generate or learn; `options` of Config."""
    run = {"runs_dir": out, "run_name": "run", "eval_every": 0, "save_every": snapshot_every, **options}
    config = WORKS[work].config(steps=steps, **run)
    lines = train(config) if mode == "train" else half_alone(mode, config)
    Path(out, "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
