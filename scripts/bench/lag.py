"""Predicted and realised lag of runs: `python -m scripts.bench.lag RUN ...` writes results/lag."""

import json
from dataclasses import asdict
from pathlib import Path

import tyro

from extras.planning.advice import config_of, measure_lag
from scripts.bench.bias import write_short
from scripts.lines import ROOT, markdown, run_command
from scripts.runs import load

OUT = ROOT / "results" / "lag"


def record_of(path: Path) -> dict:
    """Return the lag of a run, and how the run was made."""
    run = load(path)
    config = config_of(run)
    return {
        "run": path.name,
        "command": " ".join(["python", *run.info["command"][1:]]),
        "commit": run.info["git_commit"][:12],
        "dirty": bool(run.info["git_diff"]),
        "hardware": f"{run.info['hardware']['cpu_cores']} CPU cores, {run.info['hardware']['cpu']}",
        "task": config.task,
        "alpha": config.async_ratio,
        "slots": config.max_running_requests,
        "steps": len(run.metrics),
        "numbers": asdict(measure_lag(run, config)),
    }


def table(records: list[dict]) -> list[str]:
    """Return a row per task, α and slots, with the lowest and highest of its runs."""
    rows = []
    for key in dict.fromkeys((r["task"], r["alpha"], r["slots"]) for r in records):
        numbers = [r["numbers"] for r in records if (r["task"], r["alpha"], r["slots"]) == key]
        names = ("group_steps", "busy_share", "by_rates", "all_places", "realised")
        cells = [_range([n[name] for n in numbers]) for name in names]
        rows.append([f"`{key[0]}`", f"{key[1]:g}", key[2], *cells, len(numbers)])
    heading = "task | α | slots | T/s | ρ | by the rates | all places taken | realised | n"
    return markdown(heading.split(" | "), rows)


def _range(values: list[float]) -> str:
    ends = list(dict.fromkeys(f"{value:.2f}" for value in (min(values), max(values))))
    return " … ".join(ends)


def main(runs: tyro.conf.Positional[list[Path]]) -> None:
    """Write records and table of some runs.

    Args:
        runs: Directories of runs with events.
    """
    records = [record_of(path) for path in runs]
    OUT.mkdir(exist_ok=True)
    text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    (OUT / "lag.jsonl").write_text(text, encoding="utf-8")
    write_short(OUT / "lag.jsonl", table(records), __file__)
    print((OUT / "short.md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    run_command(main)
