"""One run of ours for peers.py: train_async.py with a workload's lengths.

Its one argument is what `main` takes, in JSON. Spawned processes import this file: heavy imports are inside functions.
"""

import json
import sys
from pathlib import Path

from scripts.bench.workloads import WORKLOADS, run_workload
from scripts.lines import read


def steps_of(run: Path, samples: int) -> list[dict]:
    """Return when the first engine was up, as step 0, and each step of a run: its end and what was trained in it."""
    events = read(run / "events.jsonl")
    up = next(event["time"] for event in events if event["event"] == "worker_ready")
    ends = {event["step"]: event["spans"][-1][2] for event in events if event["event"] == "step"}
    steps = [ended(0, up)]
    for line in read(run / "metrics.jsonl"):
        steps.append(ended(line["step"], ends[line["step"]], line["tokens/trained"], samples))
    return steps


def ended(step: int, time: float, tokens: float = 0.0, samples: int = 0) -> dict:
    """Return a line of steps.jsonl; `time` is Unix time."""
    return {"step": step, "time": time, "samples": samples, "tokens": tokens}


def main(workload: str, out: str, **options) -> None:
    """Train, and write steps.jsonl into the folder `out`. `options` are Config's."""
    import train_async

    run = {"runs_dir": out, "run_name": "run", "eval_every": 0}
    config = WORKLOADS[workload].config(**run, **options)
    train_async.train(config, run_workload)
    lines = steps_of(Path(out, "run"), config.groups_per_step * config.group_size)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    Path(out, "steps.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
