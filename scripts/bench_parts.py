"""The speed of each part against its limit, on the CPU: `python scripts/bench_parts.py`.

rollout      one rollout worker, rewards and log-probs included, against AsyncLLM with the same options, weights,
             prompts, seeds and sampling parameters; both are given all requests at once
trainer      Policy.train_step against forward, backward, clipping and AdamW on the same tokens, packed beforehand
publish      weights from the trainer's memory to an engine that samples with them, against one memcpy of their bytes;
             of the tiny model and of a random one of 200 MB
update       each phase of a weight update of the tiny model alone, on an idle engine; a round trip is in each
queue        controller, buffer, pipe and events of a run whose worker answers at once: no engine, no training
job          whole steps of the default task at α = 0, 1, 2: pause per update, speed-up over α = 0, and overlap: the
             step against the slower of the same loop without training and training alone
frozen_lake  speed-up over α = 0 where every turn of the environment takes 0.1 s

Whatever is compared is measured in turn, in processes that were started before; a first round is dropped. Training has
a learning rate of 1e-12, so that policy and lengths stay as they are. Lengths of `natural` and `long` are in
bench_work.py.
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from config import Config
from data.models import resolve_model
from scripts import bench_parts_job, bench_parts_rollout, bench_parts_trainer
from scripts import bench_parts_report as report
from scripts.bench_rollout_report import append, provenance
from scripts.bench_work import WORKS
from scripts.latency import run_latency_worker

ROOT = Path(__file__).resolve().parent.parent

LATENCY = "lognormal:2,0.8 scale:0.01"
"""Of a turn, as in bench_rollout.py: 0.1 s in the mean."""
FROZEN_LAKE = {"task": "frozen_lake", "max_prompt_tokens": 8, "max_response_tokens": 64}
SLOTS = 1024
"""Of the worker where the environment is slow, so that they are never what is short."""
SIZES = {
    "full": {"tickets": {"natural": 3072, "long": 768}, "steps": 10, "queue_steps": 30},
    "tiny": {"tickets": {"natural": 16, "long": 16}, "steps": 2, "queue_steps": 2},
}


def measure_rollout(size: dict, repeats: int, folder: Path) -> Iterator[dict]:
    """A rollout worker against the plain engine."""
    for name, tickets in size["tickets"].items():
        pairs = bench_parts_rollout.measure_rollout(WORKS[name].config(), tickets, repeats, folder)
        for repeat, (ours, plain) in enumerate(pairs):
            yield report.record(f"rollout {name}", repeat, ours, plain)


def measure_trainer(size: dict, repeats: int, folder: Path) -> Iterator[dict]:
    """A step of the trainer against a plain one."""
    for name in ("natural", "long"):
        pairs = bench_parts_trainer.measure_training(WORKS[name].config(), size["steps"], repeats)
        for repeat, (ours, plain) in enumerate(pairs):
            yield report.record(f"trainer {name}", repeat, ours, plain)


def measure_publish(size: dict, repeats: int, folder: Path) -> Iterator[dict]:
    """Publishing against memcpy."""
    config = WORKS["natural"].config()
    tiny = resolve_model(config.model, config.task)
    models = {
        "tiny": lambda: (tiny, bench_parts_rollout.load_weights(tiny)),
        "large": lambda: bench_parts_rollout.large_model(folder),
    }
    for name, load in models.items():
        found = bench_parts_rollout.measure_publish(config, *load(), repeats, folder)
        for repeat, m in enumerate(found):
            limit = m["bytes"] / m["memcpy_s"]
            yield report.record(f"publish {name}", repeat, m["bytes"] / m["publish_s"], limit, **m)
            if name == "large":
                yield report.record(f"stage {name}", repeat, m["bytes"] / m["stage_s"], limit)


def measure_update(size: dict, repeats: int, folder: Path) -> Iterator[dict]:
    """The phases of a weight update of an engine that stands idle."""
    for repeat, seconds in enumerate(bench_parts_rollout.measure_phases(WORKS["natural"].config(), repeats, folder)):
        for phase in report.PHASES:
            yield report.record(f"update: {phase}", repeat, seconds[phase], None)


def measure_queue(size: dict, repeats: int, folder: Path) -> Iterator[dict]:
    """What a trajectory costs between the worker and the batch."""
    for per_message in (1, 16):
        config = WORKS["natural"].config(runs_dir=str(folder), run_name=f"queue-{per_message}", eval_every=0)
        with bench_parts_job.echoing(config, per_message) as loop:
            loop.measure(size["queue_steps"])
            for repeat in range(repeats):
                m = loop.measure(size["queue_steps"])
                yield report.record(f"queue {per_message} per message", repeat, m["cpu_us"], None, **m)


def measure_job(size: dict, repeats: int, folder: Path) -> Iterator[dict]:
    """Pause, overlap and speed-up on the default task."""
    configs = {f"a{ratio}": WORKS["natural"].config(async_ratio=float(ratio)) for ratio in (0, 1, 2)}
    with bench_parts_job.started(configs, folder) as jobs:
        for repeat in range(repeats):
            found = {name: job.measure(size["steps"]) for name, job in jobs.items()}
            for ratio in (1, 2):
                job, m = jobs[f"a{ratio}"], found[f"a{ratio}"]
                generate_s = job.measure(size["steps"], train=False)["step_s"]
                train_s = job.measure_training(size["steps"])
                halves = {"generate_alone_s": generate_s, "train_alone_s": train_s}
                yield report.record(f"overlap α={ratio}", repeat, m["step_s"], max(generate_s, train_s), **m, **halves)
                yield report.record(f"pause α={ratio}", repeat, m["pause_s"], m["step_s"])
                yield report.record(f"speed-up natural α={ratio}", repeat, m["step_s"], found["a0"]["step_s"])


def measure_frozen_lake(size: dict, repeats: int, folder: Path) -> Iterator[dict]:
    """Speed-up where environments are slow."""
    common = {**FROZEN_LAKE, "max_running_requests": SLOTS}
    configs = {f"lake-a{ratio}": Config(**common, async_ratio=float(ratio)).checked() for ratio in (0, 1, 2)}
    with bench_parts_job.started(configs, folder, run_latency_worker(LATENCY)) as jobs:
        for repeat in range(repeats):
            found = {name: job.measure(size["steps"]) for name, job in jobs.items()}
            baseline = found["lake-a0"]["step_s"]
            for ratio in (1, 2):
                m = found[f"lake-a{ratio}"]
                yield report.record(f"speed-up frozen_lake α={ratio}", repeat, m["step_s"], baseline, **m)


GROUPS: dict[str, Callable] = {
    "rollout": measure_rollout,
    "trainer": measure_trainer,
    "publish": measure_publish,
    "update": measure_update,
    "queue": measure_queue,
    "job": measure_job,
    "frozen_lake": measure_frozen_lake,
}


def run(names: list[str], size: str, repeats: int, out: Path) -> None:
    """Measure some groups of parts; a part's earlier records are replaced by its first new one."""
    path, made_by, begun = out / "parts.jsonl", provenance(size), set()
    for name in names:
        with tempfile.TemporaryDirectory(prefix="bench-parts-") as folder:
            for record in GROUPS[name](SIZES[size], repeats, Path(folder)):
                if record["part"] not in begun and path.exists():
                    kept = [ln for ln in path.read_text().splitlines() if json.loads(ln)["part"] != record["part"]]
                    path.write_text("".join(line + "\n" for line in kept))
                begun.add(record["part"])
                append({**record, **made_by}, path)
                shown = "" if record["ratio"] is None else f", ratio {record['ratio']:.3f}"
                print(f"{record['part']} {record['repeat'] + 1}/{repeats}: {record['ours']:.4g}{shown}", flush=True)


def join_process_group() -> None:
    """Be the only rank, as FSDP2 wants one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def main() -> None:
    """Read the command line, measure, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=GROUPS, help="groups of parts; all unless given")
    parser.add_argument("--repeats", type=int, default=5, help="measurements per part (n)")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "parts", help="folder of the records")
    parser.add_argument("--size", choices=SIZES, default="full", help="tiny: only to see that it runs")
    parser.add_argument("--report", action="store_true", help="measure nothing, write the table again")
    arguments = parser.parse_args()
    if arguments.repeats < 1:
        parser.error(f"--repeats must be at least 1, got {arguments.repeats}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    try:
        if not arguments.report:
            join_process_group()
            run(arguments.only or list(GROUPS), arguments.size, arguments.repeats, arguments.out)
            dist.destroy_process_group()
        report.write(arguments.out)
    except ValueError as error:
        parser.error(str(error))
    print(f"records: {arguments.out}")


if __name__ == "__main__":
    main()
