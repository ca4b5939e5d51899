"""One run of ours for peers.py: train_async.py with a work's lengths.

Its one argument is what `main` takes, in JSON. Spawned processes import this file: heavy imports are inside functions.
"""

import json
import sys
from collections.abc import Iterable
from pathlib import Path

from asyncrl.config import Config
from scripts.bench.work import WORKS, run_work_worker
from scripts.lines import read


def train(config: Config) -> list[dict]:
    """The whole job, with responses of the work's lengths. Returns its start and its steps."""
    import train_async
    from asyncrl.job.checkpoints import Checkpoints

    # Weights and nothing else, as is done for TRL: a whole checkpoint would cost ours alone.
    Checkpoints._save = lambda saves, step, _: save_weights(
        saves.policy.named_full_parameters(), saves.node.run.checkpoint_path(step)
    )
    train_async.train(config, run_work_worker)
    return steps_of(
        Path(config.runs_dir, config.run_name), config.groups_per_step * config.group_size
    )


def save_weights(named: Iterable[tuple], folder: Path) -> None:
    """Write (name, tensor) of all weights into a new folder."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    save_file(
        {name: weight.detach().clone() for name, weight in named}, folder / "model.safetensors"
    )


def steps_of(run: Path, samples: int) -> list[dict]:
    """When the first engine was up, as step 0, and each step of a run: when it ended and what was trained in it."""
    events = list(read(run / "events.jsonl"))
    up = next(e["time"] for e in events if e["event"] == "worker_ready")
    ends = {e["step"]: e["spans"][-1][2] for e in events if e["event"] == "step"}
    steps = [
        ended(m["step"], ends[m["step"]], m["tokens/trained"], samples)
        for m in read(run / "metrics.jsonl")
    ]
    return [ended(0, up), *steps]


def ended(step: int, at: float, tokens: float = 0.0, samples: int = 0) -> dict:
    """A line of steps.jsonl; `at` is Unix time."""
    return {"step": step, "time": at, "samples": samples, "tokens": tokens}


def main(work: str, steps: int, out: str, snapshot_every: int = 0, **options) -> None:
    """Write steps.jsonl into the folder `out`. `options` are Config's."""
    run = {
        "runs_dir": out,
        "run_name": "run",
        "eval_every": 0,
        "save_every": snapshot_every,
        **options,
    }
    config = WORKS[work].config(steps=steps, **run)
    Path(out, "steps.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in train(config)), encoding="utf-8"
    )


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
