"""Kills and stops processes of real runs at random moments, resumes them, and proves that nothing was lost:
`python -m tests.chaos --rounds 20 --seed 0`.

A round is one fault: a signal for one process at one moment. The run is to go on, or to end within its timeout with a
line that names the cause; then it is resumed. When a run has made all its steps its account is checked, and the next
one starts.
"""

import contextlib
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import psutil
import tyro
from programs import ROOT, wait_until
from real_job import (
    Job,
    assert_every_group_is_consumed_once,
    assert_nothing_is_left,
    launch,
    resume_job,
    torchrun,
    total,
    words_of,
)

from asyncrl.cluster.processes import _has_not_ended
from asyncrl.cluster.stacks import title
from asyncrl.config import Config
from scripts.lines import provenance, replace_record

TIMEOUT_S = 60
"""The runs' --timeout-s; what is stopped is killed after half of it."""
LIMIT_S = 2 * TIMEOUT_S
"""Longest time from a fault to an end of the run, or to its recovery."""
LONGEST_DELAY_S = 20.0
ACCURACY = 0.9
"""What the default job reaches on the held-out problems: 0.956 ± 0.016 unbroken (docs/results.md)."""
AGENT = "agent"
VICTIMS = ("trainer ", "rollout ", "engine ", "rewards ", AGENT)
"""What ps calls the process that is hit; the agent is the one that was started."""
RESTARTED = ("rollout ", "engine ")
"""Those without which the run goes on once their worker is started again."""


@dataclass
class Run:
    """A run, through all of its starts."""

    folder: Path
    options: dict[str, object]
    root: Path = ROOT
    job: Job | None = None
    seen: list[psutil.Process] = field(default_factory=list)
    """All processes that were seen of its last start, the agent first."""

    def running(self) -> Job:
        """The job. If it is not running it continues from its newest checkpoint, or begins anew if there is none."""
        if self.has_ended():
            self.seen = []
            if self.job is not None and self.job.has_saved():
                self.job = resume_job(self.job)
                return self.job
            path = self.folder / "run"
            if path.exists():
                path.rename(self.folder / f"void_{self.num_starts()}")
            words = [f"--runs-dir={self.folder}", "--run-name=run", *words_of(self.options)]
            self.job = launch([*torchrun(), "train_async.py", *words], path, root=self.root)
        return self.job

    def num_starts(self) -> int:
        """How often it was started: each start prints to a file of its own."""
        return len(list(self.folder.glob("output_*")))

    def has_ended(self) -> bool:
        """Whether it is not running."""
        return self.job is None or self.job.process.poll() is not None

    def look(self) -> list[psutil.Process]:
        """All its processes that are alive; none when it has ended."""
        if self.has_ended():
            return []
        with contextlib.suppress(psutil.NoSuchProcess):
            alive = [psutil.Process(self.job.process.pid), *self.job.descendants()]
            self.seen += [process for process in alive if process not in self.seen]
            return alive
        return []


def wait_until_it_saves(run: Run) -> None:
    """Wait until a checkpoint is written beside a whole one: without that a run begins anew, and does not resume."""
    checkpoints = run.job.run_path / "checkpoints"
    left_over = set(checkpoints.glob("*.tmp"))

    def saves() -> bool:
        return bool(set(checkpoints.glob("*.tmp")) - left_over) and run.job.has_saved()

    wait_until(lambda: run.has_ended() or saves(), LIMIT_S)


def find_victim(run: Run, victim: str) -> psutil.Process | None:
    """A process of the kind, as soon as there is one; None if the run ends before."""

    def find() -> list[psutil.Process | None]:
        alive = run.look()
        if victim == AGENT or not alive:
            return alive[:1] or [None]
        return [process for process in alive if title(process).startswith(victim)]

    return wait_until(find, LIMIT_S)[0]


def hit(run: Run, victim: str, number: signal.Signals, delay_s: float | None) -> dict:
    """Make one round, so long after the last, or while the run saves if `delay_s` is None.

    Returns what was done and what came of it; an AssertionError is a defect.
    """
    run.running()
    if delay_s is None:
        wait_until_it_saves(run)
    else:
        time.sleep(delay_s)
    row = {"fault": f"{number.name} {victim}", "delay_s": delay_s}
    process = find_victim(run, victim)
    if process is None:
        assert run.job.process.returncode == 0, run.job.output()[-3000:]
        return row | {"outcome": "had finished before"}
    began, num_steps, num_printed = time.monotonic(), run.job.num_steps(), len(run.job.output())
    num_ready = len(run.job.events("worker_ready")) + (victim in RESTARTED)
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)
    outcome = wait_until(lambda: outcome_of(run, process, num_steps, num_ready), LIMIT_S)
    row |= {"step": num_steps, "outcome": outcome, "took_s": time.monotonic() - began}
    if outcome == "ended":
        row["cause"] = cause_of_end(run, number, run.job.output()[num_printed:])
        assert_nothing_is_left(run.seen[1:], set(os.listdir("/dev/shm")))
    return row


def outcome_of(run: Run, process: psutil.Process, num_steps: int, num_ready: int) -> str | None:
    """How the run has come out of a fault: it ended, or the process is gone and steps were made without it.

    Steps alone may be made of groups that are in the buffer. So workers must have become ready so often by then.
    """
    run.look()
    if run.has_ended():
        return "ended" if run.job.process.returncode else "finished"
    if process.pid == run.job.process.pid:
        return None  # gone, and some of its threads not yet: the run ends with it
    is_over = not _has_not_ended(process) and run.job.num_steps() >= num_steps + 3
    is_back = len(run.job.events("worker_ready")) >= num_ready
    return "recovered" if is_over and is_back else None


def cause_of_end(run: Run, number: signal.Signals, text: str) -> str:
    """The line that names the fault, of what was printed since; an agent that is killed says it by its status."""
    pattern = r".*(SIGKILL|exitcode: -9|the engine is dead|Engine core).*"
    if number == signal.SIGSTOP:
        pattern = r"error: .* was stopped \(SIGSTOP\) for \d+ s, and is killed"
    line = re.search(pattern, text)
    if line is not None:
        return line[0].strip()[:200]
    assert run.job.process.returncode == -signal.SIGKILL, f"no cause in\n{text[-3000:]}"
    return "killed itself: status -9"


def check_account(run: Run) -> dict:
    """Prove by the records of a finished run that each step was made once, and each group trained on once or dropped
    for a counted reason. Returns its numbers."""
    path, last = run.job.run_path, run.job.metrics()[-1]
    config = Config.from_dict(json.loads((path / "run.json").read_text())["config"])
    num_groups = config.groups_per_step
    assert_every_group_is_consumed_once(run.job, config.steps, num_groups, may_drop=True)
    assert max(run.job.values("staleness/max")) <= config.max_staleness
    return {
        "starts": run.num_starts(), "consumed": last["ledger/groups_consumed"],
        "dropped": total(last, "ledger/groups_dropped_"), "accuracy": last["eval/accuracy"],
        "restarts": last["rollout/restarts"],
    }  # fmt: skip


def run_rounds(folder: Path, num_rounds: int, seed: int) -> dict:
    """Make rounds, then finish the last run; prints a line per round. Returns all that was measured."""
    rng, rows, accounts = random.Random(seed), [], []
    run, began = None, time.monotonic()
    while run is not None or len(rows) < num_rounds:
        if run is None:
            options = {"save_every": 5, "timeout_s": TIMEOUT_S, "seed": seed + len(accounts)}
            run = Run(folder / f"run_{len(accounts)}", options)
        if len(rows) == num_rounds:
            assert run.running().wait(600) == 0, run.job.output()[-4000:]
        else:
            # a stop is rarer, as it is noticed only after half of the timeout
            number = rng.choices([signal.SIGKILL, signal.SIGSTOP], [2, 1])[0]
            delay_s = rng.choice([None, rng.uniform(0, LONGEST_DELAY_S)])
            try:
                rows.append(hit(run, rng.choice(VICTIMS), number, delay_s))
            except AssertionError:
                run.job.kill()
                raise
            print(f"round {len(rows)}/{num_rounds}  {rows[-1]}", flush=True)
        if run.has_ended() and run.job.process.returncode == 0:
            accounts.append(check_account(run))
            print(f"account: {accounts[-1]}", flush=True)
            assert accounts[-1]["accuracy"] >= ACCURACY
            run = None
    return {"seed": seed, "took_s": time.monotonic() - began, "rounds": rows, "accounts": accounts}


def main(
    rounds: int = 20, seed: int = 0, keep: Path | None = None, out: Path | None = None
) -> None:
    """Break runs on purpose.

    Args:
        rounds: signals to send
        seed: of what is drawn, and of the runs
        keep: a new folder for the runs; else they are deleted
        out: JSON lines, to which the numbers go; those of the same command are replaced
    """
    began = time.monotonic()
    made = provenance() | {"command": " ".join(["python -m tests.chaos", *sys.argv[1:]])}
    with tempfile.TemporaryDirectory(prefix="chaos-", ignore_cleanup_errors=True) as temporary:
        result = run_rounds(keep or Path(temporary), rounds, seed)
    if out:
        replace_record(made | result, out, key=("command",))
    print(f"passed in {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    tyro.cli(main)
