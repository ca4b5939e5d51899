"""The default job with checkpoints: killed and resumed against the unbroken one, and what its checkpoints cost."""

import json
import os
import random
import signal
import statistics
import time
from pathlib import Path

from asyncrl.config import Config
from chaos.campaign import LIMIT_S, Run, check_account, wait_until

CHECKPOINTS = {"save-every": 10}
LAST = 3
"""Evaluations at the end whose mean is compared; one alone has a standard error of 0.013."""
NEAR = 0.02
"""Largest difference of that mean between two runs of a seed, whose samples differ as they depend on time."""
TARGET = 0.02
"""Largest share of the trainer's time that checkpoints may take."""


def begin(folder: Path, options: dict) -> Run:
    """Start a run in a new folder."""
    folder.mkdir(parents=True)
    run = Run(folder, options)
    run.start()
    return run


def end(run: Run) -> None:
    """Wait until it has made all its steps."""
    code = run.job.wait(900)
    assert code == 0, run.job.output()[-4000:]


def accuracies(run: Run) -> dict[int, float]:
    """Held-out accuracy by policy version, of the last evaluations."""
    lines = [line for line in run.job.metrics() if "eval/accuracy" in line][-LAST:]
    return {line["eval/policy_version"]: line["eval/accuracy"] for line in lines}


def resumes(run: Run) -> list[dict]:
    """What run.json says of each time that the run has gone on."""
    return json.loads((run.path / "run.json").read_text()).get("resumed", [])


def kill_and_resume(run: Run, at_step: int, delay_s: float, num_before: int) -> dict:
    """Kill the root of all its processes some time after a step, see all of them go, and start it again."""
    manifests = "checkpoints/step_*[0-9]/resume/manifest.json"

    def has_ended() -> bool:
        return run.job.process.poll() is not None

    def has_begun() -> bool:
        has_resumed = run.num_steps() and len(resumes(run)) == num_before
        return bool(has_resumed and list(run.path.glob(manifests)))

    wait_until(lambda: has_ended() or has_begun(), "it does not go on", limit_s=5 * LIMIT_S)
    wait_until(
        lambda: has_ended() or run.num_steps() >= at_step, f"step {at_step}", limit_s=5 * LIMIT_S
    )
    time.sleep(delay_s)
    run.look()
    assert not has_ended(), f"it ended before it was killed:\n{run.job.output()[-3000:]}"
    os.kill(run.job.process.pid, signal.SIGKILL)
    assert run.job.process.wait(LIMIT_S) == -signal.SIGKILL
    run.assert_nothing_is_left()
    row = {"killed_after_step": run.num_steps(), "delay_s": delay_s}
    run.start()
    return row


def compare(folder: Path, seed: int, num_kills: int = 5) -> dict:
    """A run that is killed at random moments beside the unbroken one of its seed; an AssertionError is a defect."""
    options, rng = CHECKPOINTS | {"record": True, "seed": seed}, random.Random(seed)
    unbroken = begin(folder / "unbroken", options)
    end(unbroken)
    killed, rows = begin(folder / "killed", options), []
    # later it may end before it is killed
    first, last = CHECKPOINTS["save-every"] + 1, Config().steps - 4
    try:
        for number, at_step in enumerate(sorted(rng.sample(range(first, last), num_kills))):
            rows.append(kill_and_resume(killed, at_step, rng.uniform(0, 1), number))
            print(rows[-1], flush=True)
        end(killed)
    except AssertionError:
        killed.kill()
        raise
    for row, start in zip(rows, resumes(killed), strict=True):
        row |= {"outcome": "ended", "resumed_from": start["step"]}
    one, other = (
        {"last_evaluations": accuracies(run), **check_account(run)} for run in (unbroken, killed)
    )
    print(f"unbroken: {one}\nkilled: {other}", flush=True)
    assert one["consumed"] == other["consumed"]
    assert one["last_evaluations"].keys() == other["last_evaluations"].keys()
    means = [statistics.fmean(found["last_evaluations"].values()) for found in (one, other)]
    assert abs(means[0] - means[1]) <= NEAR, means
    return {
        "seed": seed,
        "rounds": rows,
        "accounts": [other],
        "unbroken": [one],
        "last_accuracy": means,
    }


def measure_cost(folder: Path, num_pairs: int) -> dict:
    """Default runs with checkpoints and without, in turn and every second pair backwards.

    Of each: seconds in its steps but the first, which the last checkpoint is not in; and of the trainer's state `save`
    in them, which has no checkpoint at all in a run without.
    """
    pairs = []
    for number in range(num_pairs):
        pair, arms = {}, [("without", {}), ("with", CHECKPOINTS)]
        for name, options in arms[:: -1 if number % 2 else 1]:
            run = begin(folder / f"{name}_{number}", {"seed": number, **options})
            end(run)
            steps = run.job.metrics()[1:]
            save_s = sum(line["trainer_time/save"] * line["time/step_s"] for line in steps)
            pair[name] = {"steps_s": sum(line["time/step_s"] for line in steps), "save_s": save_s}
        pair["share"] = pair["with"]["save_s"] / pair["with"]["steps_s"]
        pair["longer"] = pair["with"]["steps_s"] / pair["without"]["steps_s"] - 1
        pairs.append(pair)
        print(pair, flush=True)
    shares = [pair["share"] for pair in pairs]
    return {"n": num_pairs, "share": statistics.median(shares), "target": TARGET, "pairs": pairs}
