"""One run of ours for bench_peers.py: train_async.py with a work's lengths, or one half of it alone on both cores.

Heavy imports are inside functions, as in train_async.py: every process that is spawned imports this file.
"""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

from config import Config
from scripts.bench_work import SAMPLES_PER_STEP, WORKS, run_work_worker

KINDS = ("train", "generate", "learn")


def train(config: Config) -> None:
    """The whole job, with responses of the work's lengths."""
    import train_async
    from trainer.policy import Policy

    Policy.save = save_weights
    train_async.train(config, run_work_worker)


def save_weights(policy, path: str, *_, **__) -> None:
    """Write the weights and nothing else, as is done for TRL: a whole checkpoint would cost ours alone."""
    from safetensors.torch import save_file

    Path(path).mkdir(parents=True)
    weights = {name: weight.detach().clone() for name, weight in policy.named_full_parameters()}
    save_file(weights, Path(path) / "model.safetensors")


def steps_of(run: Path) -> list[dict]:
    """Each step of a run: when it ended, Unix time, and what was trained in it."""
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    ends = {event["step"]: event["spans"][-1][2] for event in events if event["event"] == "step"}
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [
        {"step": m["step"], "time": ends[m["step"]], "samples": SAMPLES_PER_STEP, "tokens": m["tokens/trained"]}
        for m in metrics
    ]


def half_alone(kind: str, config: Config, out: Path) -> list[dict]:
    """Steps of the loop without training, on two workers of one thread; or of training alone, on two threads."""
    import torch

    from scripts import bench_parts_job
    from scripts.bench_parts import join_process_group

    join_process_group()
    workers = 2 if kind == "generate" else 1
    config = replace(config, num_rollout_workers=workers, async_ratio=2.0)
    with bench_parts_job.started({"run": config}, out) as jobs:
        job, ends = jobs["run"], []
        torch.set_num_threads(2 if kind == "learn" else 1)
        for step in range(1, config.steps + 1):
            if kind == "generate":
                with bench_parts_job.quiet():
                    job.run_step(train=False)
            groups = job.batches[step % len(job.batches) if kind == "learn" else -1]
            if kind == "learn":
                job.train(groups)
            tokens = bench_parts_job.group_tokens(groups)
            ends.append({"step": step, "time": time.time(), "samples": SAMPLES_PER_STEP, "tokens": tokens})
        return ends


def main() -> None:
    """Do what the command line says, and write steps.jsonl."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kind", choices=KINDS, required=True)
    parser.add_argument("--work", choices=WORKS, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--async-ratio", type=float, default=1.0)
    parser.add_argument("--num-workers", type=int, default=1, help="rollout workers of a whole job")
    parser.add_argument("--snapshot-every", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    config = WORKS[given.work].config(
        steps=given.steps,
        async_ratio=given.async_ratio,
        num_rollout_workers=given.num_workers,
        eval_every=0,
        save_every=given.snapshot_every,
        runs_dir=str(given.out),
        run_name="run",
    )
    if given.kind == "train":
        train(config)
        steps = steps_of(given.out / "run")
    else:
        steps = half_alone(given.kind, config, given.out)
    lines = [json.dumps(step) + "\n" for step in steps]
    (given.out / "steps.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
