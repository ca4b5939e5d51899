"""Several losses on the same stale data: `python scripts/compare_replays.py RUN [RUN ...] --algos grpo tis`.

Every RUN, a directory made with --record, is replayed once with each loss and evaluated at its end. OUT/replays.jsonl
keeps a line for each run and each replay: how it was made, held-out accuracy, curves and the fingerprint of the last
weights. A replay that is there is not made again. OUT/table.md has means over the runs.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from config import Algo
from records.batches import weights_sha256
from scripts.plot import column, evaluations, mean, read_metrics
from scripts.table import cell

ROOT = Path(__file__).resolve().parent.parent

SERIES = {"drift_k3": "drift/k3", "entropy": "loss/entropy", "ess": "loss/ess", "grad_norm": "loss/grad_norm"}
"""What is kept of every step: its name here and in metrics.jsonl."""
DIGITS = 4  # significant, of every kept number
COLUMNS = {
    "accuracy": ("held-out accuracy of the last weights", "{:.3f}"),
    "drift_k3": ("KL(behavior ‖ current), nats per token", "{:.4f}"),
    "entropy": ("entropy, nats per token", "{:.3f}"),
    "ess": ("effective sample size", "{:.3f}"),
}
"""Columns of the table; all but the first are means over the last tenth of the steps."""
RECORDED = "recorded run"


def replay(run: Path, algo: str) -> dict:
    """Replay a run with a loss. Returns its record; raises ValueError, with the error of the replay, if it fails."""
    with tempfile.TemporaryDirectory(prefix="replays-") as runs:
        options = [str(run), "--algo", algo, "--evaluate"]
        command = [sys.executable, "scripts/replay.py", *options, "--runs-dir", runs, "--run-name", "replay"]
        job = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if job.returncode:
            raise ValueError(f"{' '.join(options)} ended with status {job.returncode}: {job.stderr[-500:].strip()}")
        made_by = {"kind": "replay", "of": run.name, "command": " ".join(["python scripts/replay.py", *options])}
        return made_by | read_run(Path(runs) / "replay")


def read_run(path: Path) -> dict:
    """What is kept of a run or a replay."""
    metrics = read_metrics(path)
    header = json.loads((path / "run.json").read_text(encoding="utf-8"))
    return {
        **{key: header[key] for key in ("git_commit", "hardware", "packages")},
        "git_dirty": bool(header["git_diff"]),
        "algo": header["config"]["algo"],
        "seed": header["config"]["seed"],
        "accuracy": evaluations(metrics)[-1][1],
        "weights_sha256": weights_sha256(path / "checkpoints" / f"step_{metrics[-1]['step']}"),
        "series": {name: [float(f"{v:.{DIGITS}g}") for v in column(metrics, key)] for name, key in SERIES.items()},
    }


def read_recorded(run: Path) -> dict:
    """The record of a recorded run itself."""
    command = json.loads((run / "run.json").read_text(encoding="utf-8"))["command"]
    return {"kind": RECORDED, "of": run.name, "command": " ".join(command)} | read_run(run)


def summarise(record: dict) -> dict[str, float]:
    """The numbers of COLUMNS."""
    series = record["series"]
    tenths = {name: mean(values[-max(1, len(values) // 10) :]) for name, values in series.items()}
    return {"accuracy": record["accuracy"], **tenths}


def table(records: list[dict]) -> list[str]:
    """Markdown lines: recorded runs first, then a row per loss, mean ± standard deviation over the runs."""
    lines = [f"| trained with | n | {' | '.join(heading for heading, _ in COLUMNS.values())} |"]
    lines.append("|---" * (len(COLUMNS) + 2) + "|")
    for kind, algo in dict.fromkeys((record["kind"], record["algo"]) for record in records):
        chosen = [summarise(r) for r in records if (r["kind"], r["algo"]) == (kind, algo)]
        name = f"{RECORDED}, `{algo}`" if kind == RECORDED else f"`{algo}`"
        cells = [cell([summary[key] for summary in chosen], template) for key, (_, template) in COLUMNS.items()]
        lines.append(f"| {name} | {len(chosen)} | {' | '.join(cells)} |")
    return lines


def read_records(out: Path) -> list[dict]:
    """The records of OUT/replays.jsonl, none if there is no such file."""
    path = out / "replays.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def keep(record: dict, out: Path) -> None:
    """Append a record, and say how it ended."""
    with open(out / "replays.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
    print(f"{record['of']}, {record['kind']}, {record['algo']}: held-out accuracy {record['accuracy']:.3f}", flush=True)


def main() -> None:
    """Read the command line, make what is missing, write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="directory of a run made with --record")
    parser.add_argument("--algos", nargs="+", required=True, choices=Algo.__args__, metavar="ALGO")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "replay", help="where the records are kept")
    arguments = parser.parse_args()
    out = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    finished = {(record["of"], record["kind"], record["algo"]) for record in read_records(out)}
    try:
        for run in arguments.runs:
            recorded = read_recorded(run)
            if (run.name, RECORDED, recorded["algo"]) not in finished:
                keep(recorded, out)
            for algo in arguments.algos:
                if (run.name, "replay", algo) not in finished:
                    keep(replay(run, algo), out)
    except ValueError as error:
        sys.exit(f"error: {error}")
    lines = table(read_records(out))
    (out / "table.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
