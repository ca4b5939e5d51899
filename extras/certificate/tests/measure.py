"""Measures the certificate: `python extras/certificate/tests/measure.py --out FILE [--only CASE ...]`.

Each run of faults.py is a line of FILE: its fault, when the first wrong token was trained, and what noticed it when. A
check follows each step, and has all of its 32 responses. Runs that FILE has are not made again.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[3]
FIRST = 4
"""First version with the fault."""
LAGS = {
    "lag 0": "--async-ratio 0",
    "lag 4": "--async-ratio 0 --publish-delay 4",
    "alpha 1": "--async-ratio 1",
    "alpha 1, recompute": "--async-ratio 1 --on-update recompute",
    "alpha 2, recompute": "--async-ratio 2 --on-update recompute",
}
FAULTS = {"stamps": "lag 4", "half": "alpha 1", "shift": "alpha 1", "keys": "alpha 2, recompute"}
STEPS = {
    "float32": {"stamps": 10, "half": 8, "shift": 8, "keys": 20},
    "bfloat16": {"stamps": 24, "shift": 10, "half": 16},
}
HEALTHY = {
    "float32": ["lag 0", "lag 4", "alpha 1", "alpha 1, recompute"],
    "bfloat16": ["lag 0", "lag 4", "alpha 1"],
}
CASES = {
    f"none, {lag}, {dtype}": ("none", lag, dtype, 55, (0,))
    for dtype, lags in HEALTHY.items()
    for lag in lags
} | {
    f"{fault}, {dtype}": (fault, FAULTS[fault], dtype, steps, (0, 1, 2))
    for dtype, steps_of_faults in STEPS.items()
    for fault, steps in steps_of_faults.items()
}
"""Fault, lag, dtype, steps and seeds of each case."""


def run_case(case: str, seed: int, folder: str) -> dict:
    """Run a job to its end, and return its record."""
    fault, lag, dtype, steps, _ = CASES[case]
    name = f"{case}-{seed}".replace(", ", "-").replace(" ", "_")
    options = f"--certificate 1 --groups-per-step 8 --group-size 4 --eval-every 0 --save-every None --steps {steps}"
    words = ["extras/certificate/tests/faults.py", fault, str(FIRST), *options.split()]
    words += [*LAGS[lag].split(), "--dtype", dtype, "--seed", str(seed)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    ended = subprocess.run(
        [sys.executable, *words, "--runs-dir", folder, "--run-name", name],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if ended.returncode:
        raise RuntimeError(f"{case}, seed {seed}: {(ended.stdout + ended.stderr)[-1500:]}")
    record = {
        "case": case,
        "fault": fault,
        "lag": lag,
        "dtype": dtype,
        "seed": seed,
        "steps": steps,
    }
    record |= read_run(Path(folder, name), fault)
    record["cpu_s"] = round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1)
    header = json.loads(Path(folder, name, "run.json").read_text())
    return record | {
        "command": ["python", *words],
        "git_commit": header["git_commit"],
        "hardware": header["hardware"],
    }


def read_run(path: Path, fault: str) -> dict:
    """Return what noticed the fault of a run, and when."""
    checks = json.loads((path / "certificate.json").read_text())["checks"]
    events = [json.loads(line) for line in (path / "events.jsonl").read_text().splitlines()]
    wrong = [check["step"] for check in checks if is_wrong(check, fault)]
    first = wrong[0] if wrong else len(checks) + 1
    alarms = [check for check in checks if check["alarms"]]
    noticed = [check for check in alarms if check["step"] >= first]
    step = 0
    steps_of_probe = []
    for event in events:
        step = event["step"] if event["event"] == "step" else step
        if event["event"] == "warning" and "certificate" not in event["text"]:
            steps_of_probe.append(step + 1)
    values = [check["values"] for check in checks]
    return {
        "checks": len(checks),
        "tokens": sum(value["tokens"] for value in values),
        "false_alarms": sum(check["step"] < first for check in alarms),
        "first_wrong_step": first if wrong else None,
        "noticed_step": noticed[0]["step"] if noticed else None,
        "rules": [*noticed[0]["alarms"]] if noticed else [],
        "rules_later": sorted({rule for check in noticed for rule in check["alarms"]}),
        "probe_noticed_step": next(iter(steps_of_probe), None),
        "worst_max": max(value["worst"] for value in values),
        "shift_max": max(abs(value["shift"]) for value in values),
        "shift_sigmas_max": max(abs(value["shift_sigmas"]) for value in values),
        "version_before_sigmas_max": max(value["version_before_sigmas"] for value in values),
        "version_after_sigmas_max": max(value["version_after_sigmas"] for value in values),
        "growth_sigmas_max": max(value["growth_sigmas"] for value in values),
        "check_s_median": sorted(value["seconds"] for value in values)[len(values) // 2],
    }


def is_wrong(check: dict, fault: str) -> bool:
    """Return whether a check has tokens of the fault."""
    values = check["values"]
    if fault == "keys":
        return values.get("tokens/after_update", 0) > 0
    start = "tokens/lag_"  # then 0, 1, 2 or 3-4
    lags = [int(name[len(start)]) for name in values if name.startswith(start)]
    newest = check["step"] - 1 - min(lags) - (fault == "stamps")
    return fault != "none" and newest >= FIRST


def main() -> None:
    """Make the runs that are missing."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=list(CASES))
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    arguments = parser.parse_args()
    text = arguments.out.read_text() if arguments.out.exists() else ""
    made = {(line["case"], line["seed"]) for line in map(json.loads, text.splitlines())}
    for case in arguments.only:
        for seed in CASES[case][-1]:
            if (case, seed) in made or seed not in arguments.seeds:
                continue
            with tempfile.TemporaryDirectory() as folder:
                record = run_case(case, seed, folder)
            with open(arguments.out, "a") as file:
                file.write(json.dumps(record) + "\n")
            shown = ("noticed_step", "first_wrong_step", "rules", "false_alarms", "cpu_s")
            print(case, seed, {name: record[name] for name in shown}, flush=True)


if __name__ == "__main__":
    main()
