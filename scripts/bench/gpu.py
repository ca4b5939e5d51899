"""Measurements on a GPU, in one table: `python scripts/bench/gpu.py`, or `bash scripts/gpu_check.sh`.

Each part runs in its own process, within a time limit. So a part that fails or hangs leaves the other rows. A machine
with several GPUs begins with parts for several. A part that no longer fits into the budget is not begun, and the table
reports it. Each part is at once a line of gpu.jsonl, with its origin. A bench that is started again runs the parts that
failed or were not begun. `--device cpu --out FOLDER` runs the same code with a tiny model and without a GPU. It checks
that the code runs, and is no measurement.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from asyncrl.cluster.gpus import visible_gpus
from asyncrl.cluster.processes import kill_with_sessions
from scripts.lines import ROOT, provenance, read, replace_record, run_command

BUDGET_S = 470.0
"""Seconds of one call. The whole takes several calls, an hour at most."""
FAR_OFF = 1.5
"""Factor between measurement and prediction from which the table says what to change."""
OF_CHILDREN = ("CalledProcessError", "ChildFailedError")
"""Errors of subprocess and torchrun that only report the failure of a process."""
MAKERS = ("commit", "changes", "hardware", "packages")
"""Fields of a record. Its part runs again if one of them differs."""
NO_GPU = "no GPU: the numbers mean nothing"
TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
"""The parts, and the rows of the table. gpu.toml explains them."""


# Parts


class Part(NamedTuple):
    """The limits of a part."""

    limit_s: float
    num_gpus: int


def chosen_parts(device: str, only: list[str] | None, num_gpus: int) -> dict[str, Part]:
    """Return the parts whose name, or its first word, is in `only`. For None return all that `num_gpus` GPUs can run.

    Parts for several GPUs come first. Raises ValueError for a name that no such part has.
    """
    if device == "cpu":
        parts = {name: Part(limit_s, 0) for name, limit_s in TABLES["tiny_parts"].items()}
    else:
        alone = {name: Part(limit_s, 1) for name, limit_s in TABLES["parts"].items()}
        fitting = {
            name: Part(limit_s, max(count for count in counts if count <= num_gpus))
            for name, (limit_s, *counts) in TABLES["parts_of_several"].items()
            if counts[0] <= num_gpus
        }
        parts = fitting | {name: part for name, part in alone.items() if name not in fitting}
    names = {part: {part, part.split()[0]} for part in parts}
    known = sorted(set().union(*names.values()))
    for name in only or known:
        if name not in known:
            listed = ", ".join(map(repr, known))
            raise ValueError(f"--only {name!r} is none of the parts for {num_gpus} GPUs: {listed}")
    return {name: part for name, part in parts.items() if names[name] & set(only or known)}


def check(device: str, out: Path, makers: dict) -> None:
    """Raise ValueError if there is no GPU, or if records would not be fit for the folder."""
    is_kept = out.resolve().is_relative_to(ROOT / "results")
    if device == "cuda" and gpu_name() is None:
        raise ValueError(
            "torch sees no NVIDIA GPU; --device cpu --out FOLDER runs the same code without one"
        )
    if device == "cpu" and is_kept:
        raise ValueError(
            "what --device cpu measures means nothing; keep it out of results/ with --out FOLDER"
        )
    if makers["dirty"] and is_kept:
        raise ValueError(
            f"records in {out} name their commit, and changes are uncommitted; commit them or give --out"
        )


def run_parts(parts: dict[str, Part], device: str, budget_s: float, path: Path) -> None:
    """Run the parts that the file has no numbers of, and put their records there.

    A part begins only if it can have all of its time. A later part can be shorter, and begin.
    """
    deadline = time.monotonic() + budget_s
    gpu = gpu_name() if device == "cuda" else None
    makers = provenance()
    done = {
        record["case"]
        for record in read(path)
        if "numbers" in record
        and record["gpu"] == gpu
        and all(record[name] == makers[name] for name in MAKERS)
    }
    with tempfile.TemporaryDirectory(prefix="bench-gpu-models-") as models:
        for part, needs in parts.items():
            if part in done:
                continue
            left_s = max(0.0, deadline - time.monotonic())
            waits = f"not run: it can take {needs.limit_s:.0f} s, and {left_s:.0f} s are left"
            outcome = {"seconds": 0.0, "failed": waits}
            if left_s >= needs.limit_s:
                outcome = run_part(part, needs, device, models)
            kind, model = part.split()
            place = {"case": part, "kind": kind, "model": model, "gpu": gpu}
            replace_record(place | outcome | makers, path, ("case", "gpu"))
            print(f"{part}: {outcome.get('failed', 'done')}", flush=True)


def run_part(part: str, needs: Part, device: str, models: str) -> dict:
    """Run a part in a process of its own. Returns its seconds with its numbers, or with how it failed."""
    folder = Path(tempfile.mkdtemp(prefix=f"bench-gpu-{part.replace(' ', '-')}-"))
    log, result = folder / "log", folder / "numbers.json"
    command = [sys.executable, __file__, "--part", *part.split(), device, models, str(result)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    if device == "cuda":
        environment["CUDA_VISIBLE_DEVICES"] = first_gpus(needs.num_gpus)
    start = time.monotonic()
    with open(log, "w", encoding="utf-8") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=output, start_new_session=True
        )  # fmt: skip
    try:
        how = f"exited with {process.wait(needs.limit_s)}"
    except subprocess.TimeoutExpired:
        how = f"took more than {needs.limit_s:.0f} s"
    finally:
        kill_with_sessions(process)
    seconds = {"seconds": round(time.monotonic() - start, 1)}
    if result.exists():
        return seconds | {"numbers": json.loads(result.read_text())}
    return seconds | {"failed": f"{how}; {last_error(log.read_text())} ({log})"}


def last_error(log: str) -> str:
    """Return the last line of a log that names an error of a part or its run. Without one return the last line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()] or ["it printed nothing"]
    errors = [line for line in lines if "Error" in line or line.startswith("error:")]
    own_errors = [line for line in errors if not any(name in line for name in OF_CHILDREN)]
    return (own_errors or lines)[-1][:200]


def measure(kind: str, model: str, device: str, models: str, result: str) -> None:
    """Run a part: the body of its process."""
    from scripts.bench.trainer_alone import FUNCTIONS, Setup

    if kind not in FUNCTIONS:
        from scripts.bench.fake_ranks import FUNCTIONS
    if kind not in FUNCTIONS:
        from scripts.bench.gpu_parts import FUNCTIONS  # and with it what only an engine needs

    numbers = FUNCTIONS[kind](Setup(device, model, Path(models)))
    Path(result).write_text(json.dumps(numbers))
    sys.stdout.flush()
    # only engines have yet to end, and their end must not fail a part that has been measured
    os._exit(0)


def first_gpus(num_gpus: int) -> str:
    """Return the value of CUDA_VISIBLE_DEVICES with which only the first of the visible GPUs are visible."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else list(map(str, range(num_gpus)))
    return ",".join(names[:num_gpus])


def gpu_name() -> str | None:
    """Return the first GPU's name and memory."""
    gpus = visible_gpus()
    return f"{gpus[0].name}, {gpus[0].total_bytes / 2**30:.0f} GiB" if gpus else None


# The table


def table(records: list[dict]) -> str:
    """Return each GPU's name, with a row for each of its numbers, and one for each part that failed."""
    gpus: dict[str | None, dict[str, dict]] = {}
    for record in records:
        gpus.setdefault(record["gpu"], {})[record["case"]] = record
    blocks = [f"{gpu or NO_GPU}\n{_table_of_gpu(newest)}" for gpu, newest in gpus.items()]
    return "\n\n".join(blocks)


def _table_of_gpu(newest_by_case: dict[str, dict]) -> str:
    newest = newest_by_case.values()
    measured = [record for record in newest if "numbers" in record]
    numbers = {record["kind"]: record["numbers"] for record in measured}
    rows = [row for record in measured for row in _rows(record)]
    for what, (above, below, key, form) in TABLES["ratios"].items():
        if {above, below} <= numbers.keys():
            rows.append((what, form.format(numbers[above][key] / numbers[below][key])))
    for record in measured:
        for key, prediction in TABLES["predictions"].get(record["case"], {}).items():
            text = beside_prediction(record["numbers"], key, *prediction)
            rows.append((f"{record['case']}, {key}", text))
    rows += [(record["case"], record["failed"]) for record in newest if "failed" in record]
    width = max((len(what) for what, _ in rows), default=0)
    return "\n".join(f"{what:{width}}  {value}" for what, value in rows)


def beside_prediction(
    numbers: dict, key: str, predicted: float | str, assumed: str, change: str
) -> str:
    """Return a number beside the prediction, and the change to make if it is far off.

    `predicted` is a number, or the name of another number of the part.
    """
    number = numbers[key]
    if isinstance(predicted, str):
        predicted = numbers[predicted]
    ratio = number / predicted
    text = f"{number:.3g}, predicted {predicted:.3g}, {ratio:.2f} ×: {assumed}"
    return text if 1 / FAR_OFF < ratio < FAR_OFF else f"{text}; CHANGE {change}"


def _rows(record: dict) -> Iterator[tuple[str, str]]:
    """Yield what a part's numbers say; memory is not taken on the CPU, and then has no row."""
    fields = record | record["numbers"]
    for what, value in TABLES["rows"][record["kind"].split("-")[0]].items():
        with contextlib.suppress(KeyError):
            yield what.format_map(fields), value.format_map(fields)


def made_by(records: Iterable[dict]) -> list[str]:
    """Return what made the records, a line for each command and commit."""
    lines = {}
    for r in records:
        packages = ", ".join(f"{name} {version}" for name, version in r["packages"].items())
        code = f"`{r['command']}`: commit {r['commit']}{', with changes' * r['dirty']}"
        load = f"load {r['load_before']} before the start"
        lines[f"{code}; {r['hardware']}; {load}; {packages}."] = None
    return list(lines)


def write(out: Path) -> list[dict]:
    """Write table.md from the records, and return them. Raises ValueError if there is no record."""
    records = read(out / "gpu.jsonl")
    if not records:
        raise ValueError(f"{out}/gpu.jsonl has no records; run python scripts/bench/gpu.py first")
    how = "What is measured, and how, is on top of `scripts/bench/gpu.py`. Numbers are medians [minimum–maximum]."
    commands = "\n".join(made_by(records))
    shown = f"```\n{table(records)}\n```"
    text = "\n\n".join(["# What a GPU gives", commands, how, shown])
    (out / "table.md").write_text(f"{text}\n", encoding="utf-8")
    return records


# The command line


def main(
    out: Path = ROOT / "results" / "gpu",
    only: list[str] | None = None,
    device: Literal["cuda", "cpu"] = "cuda",
    budget_s: float = BUDGET_S,
    report: bool = False,
) -> None:
    """Measure and print the table; exits with 1 if a part failed.

    Args:
        out: Folder of the records.
        only: Parts, or first words of parts; unset has all.
        device: Device of all parts.
        budget_s: Seconds in all.
        report: Write the page again without a measurement.
    """
    if not report:
        parts = chosen_parts(device, only, len(visible_gpus()) if device == "cuda" else 0)
        check(device, out, provenance())
        run_parts(parts, device, budget_s, out / "gpu.jsonl")
    records = write(out)
    print(f"{table(records)}\nrecords: {out}", flush=True)
    sys.exit(any("failed" in record for record in records))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--part"]:
        measure(*sys.argv[2:])
    else:
        run_command(main)
