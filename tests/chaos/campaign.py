"""Kills and stops processes of real runs at random moments, resumes them, and proves that nothing was lost.

A round is one fault: a signal for one process in one phase. The run is to go on, or to end within its timeout with a
line that names the cause; then it is resumed. When a run has made all its steps its account is checked, and the next
one starts.
"""

import contextlib
import json
import random
import re
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from programs import wait_until
from real_job import (
    Job,
    assert_every_group_is_consumed_once,
    launch,
    resume_job,
    torchrun,
    total,
    words_of,
)

from asyncrl.config import Config

TIMEOUT_S = 60
"""The runs' --timeout-s; what is stopped is killed after half of it."""
LIMIT_S = 2 * TIMEOUT_S
"""Longest time from a fault to an end of the run, or to its recovery."""
ACCURACY = 0.9
"""What the default job reaches on the held-out problems: 0.956 ± 0.016 unbroken (docs/results.md)."""
OPTIONS = {"save_every": 5, "timeout_s": TIMEOUT_S}
VICTIMS = {
    "trainer": "trainer ",
    "worker": "rollout ",
    "engine": "engine ",
    "reward": "rewards ",
    "agent": None,
}
"""What ps calls the process that is hit; the agent is the one that was started."""
PHASES = ("start", "sampling", "update", "evaluation", "checkpoint")


@dataclass(frozen=True)
class Fault:
    """One process, one signal, one moment."""

    victim: str
    number: signal.Signals
    phase: str
    delay_s: float
    """How long into the phase."""

    def __str__(self) -> str:
        return f"{self.number.name} {self.victim} in {self.phase} + {self.delay_s:.2f} s"


def draw(rng: random.Random) -> Fault:
    """A fault; a stop is rarer, as it is noticed only after half of the timeout."""
    number = rng.choices([signal.SIGKILL, signal.SIGSTOP], [2, 1])[0]
    phase = rng.choice(PHASES)
    longest_s = {"start": 8.0, "sampling": 2.0}.get(phase, 0.1)
    return Fault(rng.choice(list(VICTIMS)), number, phase, rng.uniform(0, longest_s))


@dataclass
class Run:
    """A run of the default job, through all of its starts."""

    folder: Path
    options: dict[str, object]
    job: Job | None = None
    num_starts: int = 0
    seen: list[psutil.Process] = field(default_factory=list)
    """All processes that were seen of its last start, the agent first."""

    def running(self) -> Job:
        """The job. If it is not running it continues from its newest checkpoint, or begins anew if there is none."""
        if self.has_ended():
            self.num_starts += 1
            self.seen = []
            if self.job is not None and self.job.has_saved():
                self.job = resume_job(self.job)
                return self.job
            path = self.folder / "run"
            if path.exists():
                path.rename(self.folder / f"void_{self.num_starts}")
            words = [f"--runs-dir={self.folder}", "--run-name=run", *words_of(self.options)]
            self.job = launch([*torchrun(), "train_async.py", *words], path)
        return self.job

    def has_ended(self) -> bool:
        """Whether it is not running."""
        return self.job is None or self.job.process.poll() is not None

    def stop(self) -> bool:
        """Have it end as a user would, after the running step. Returns whether there are steps left to make."""
        if self.has_ended():
            return True
        self.look()
        self.job.process.send_signal(signal.SIGTERM)
        code = self.job.wait(LIMIT_S)
        self.assert_nothing_is_left()
        return code != 0

    def look(self) -> list[psutil.Process]:
        """All its processes that are alive; none when it has ended."""
        if self.has_ended():
            return []
        with contextlib.suppress(psutil.NoSuchProcess):
            alive = [psutil.Process(self.job.process.pid), *self.job.descendants()]
            self.seen += [process for process in alive if process not in self.seen]
            return alive
        return []

    def assert_nothing_is_left(self) -> None:
        """All processes that were ever seen of its last start are gone within seconds."""
        _, alive = psutil.wait_procs(self.seen[1:], timeout=20)
        assert not alive, f"left behind: {[process.cmdline()[:1] for process in alive]}"


def wait_for_phase(run: Run, fault: Fault) -> bool:
    """Have the run be where the fault is to come. Returns False if it ended on the way, by itself."""
    if fault.phase == "start" and not run.stop():
        return False
    job = run.running()
    newest_step = job.num_steps()
    checkpoints = job.run_path / "checkpoints"
    left_over = set(checkpoints.glob("*.tmp"))

    def is_reached() -> bool:
        nonlocal newest_step
        before, newest_step = newest_step, job.num_steps()
        if fault.phase == "checkpoint":
            # of a second one: with none before it a run begins anew, and does not resume
            return bool(set(checkpoints.glob("*.tmp")) - left_over) and job.has_saved()
        # steps may become fewer: records are cut back when a run goes on
        is_due = fault.phase != "evaluation" or newest_step % Config().eval_every == 0
        return fault.phase == "start" or (newest_step > before and is_due)

    wait_until(lambda: run.has_ended() or is_reached(), LIMIT_S)
    time.sleep(fault.delay_s)
    return not run.has_ended()


def find_victim(run: Run, fault: Fault, rng: random.Random) -> psutil.Process | None:
    """A process of the kind, as soon as there is one; None if the run ends before."""
    title = VICTIMS[fault.victim]

    def find() -> list[psutil.Process | None]:
        alive = run.look()
        if title is None or not alive:
            return alive[:1] or [None]
        return [process for process in alive if _title(process).startswith(title)]

    return rng.choice(wait_until(find, LIMIT_S))


def _title(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.NoSuchProcess):
        return " ".join(process.cmdline())
    return ""


def is_gone(process: psutil.Process) -> bool:
    """Whether a process has ended; one that nobody has missed yet has."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def do(run: Run, fault: Fault, rng: random.Random) -> dict:
    """Make one round: returns what was done and what came of it; an AssertionError is a defect."""
    row = {"fault": str(fault)}
    process = find_victim(run, fault, rng) if wait_for_phase(run, fault) else None
    if process is None:
        assert run.job.process.returncode == 0, run.job.output()[-3000:]
        return row | {"outcome": "had finished before"}
    began, num_steps, num_printed = time.monotonic(), run.job.num_steps(), len(run.job.output())
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(fault.number)
    outcome = wait_until(lambda: outcome_of(run, process, num_steps), LIMIT_S)
    row |= {"step": num_steps, "outcome": outcome, "took_s": time.monotonic() - began}
    if outcome == "ended":
        row["cause"] = cause_of_end(run, fault, run.job.output()[num_printed:])
        run.assert_nothing_is_left()
    return row


def outcome_of(run: Run, process: psutil.Process, num_steps: int) -> str | None:
    """How the run has come out of a fault: it ended, or the process is gone and steps were made without it."""
    run.look()
    if run.has_ended():
        return "ended" if run.job.process.returncode else "finished"
    if process.pid == run.job.process.pid:
        return None  # gone, and some of its threads not yet: the run ends with it
    return "recovered" if is_gone(process) and run.job.num_steps() >= num_steps + 3 else None


def cause_of_end(run: Run, fault: Fault, text: str) -> str:
    """The line that names the fault, of what was printed since; an agent that is killed says it by its status."""
    pattern = r".*(SIGKILL|exitcode: -9|the engine is dead|Engine core).*"
    if fault.number == signal.SIGSTOP:
        pattern = r"error: .* was stopped \(SIGSTOP\) for \d+ s, and is killed"
    line = re.search(pattern, text)
    if line is not None:
        return line[0].strip()[:200]
    assert run.job.process.returncode == -signal.SIGKILL, f"{fault}: no cause in\n{text[-3000:]}"
    return "killed itself: status -9"


def check_account(run: Run) -> dict:
    """Prove by the records of a finished run that each step was made once, and each group trained on once or dropped
    for a counted reason. Returns its numbers."""
    path, last = run.job.run_path, run.job.metrics()[-1]
    config = Config.from_dict(json.loads((path / "run.json").read_text())["config"])
    num_groups = config.groups_per_step
    assert_every_group_is_consumed_once(run.job, config.steps, num_groups, may_drop=True)
    assert max(run.job.values("staleness/max")) <= config.max_staleness
    accuracy = last.get("eval/accuracy")
    assert not config.eval_every or accuracy >= ACCURACY, accuracy
    return {
        "starts": run.num_starts, "consumed": last["ledger/groups_consumed"],
        "dropped": total(last, "ledger/groups_dropped_"), "accuracy": accuracy, "restarts": last["rollout/restarts"],
    }  # fmt: skip


def run_rounds(
    folder: Path, num_rounds: int, seed: int, options: dict | None = None, faults=None
) -> dict:
    """Make rounds, then finish the last run; prints a line per round. Returns all that was measured."""
    rng, rows, accounts = random.Random(seed), [], []
    run, began = None, time.monotonic()

    def add_account() -> None:
        accounts.append(check_account(run))
        print(f"account: {accounts[-1]}", flush=True)

    for number in range(num_rounds):
        fault = faults[number] if faults else draw(rng)
        if run is None:
            run = Run(
                folder / f"run_{len(accounts)}",
                OPTIONS | {"seed": seed + len(accounts)} | (options or {}),
            )
        try:
            rows.append(do(run, fault, rng))
        except AssertionError:
            run.job.kill()
            raise
        print(f"round {number + 1}/{num_rounds}  {rows[-1]}", flush=True)
        if rows[-1]["outcome"] in ("finished", "had finished before"):
            add_account()
            run = None
    if run is not None:
        assert run.running().wait(600) == 0, run.job.output()[-4000:]
        add_account()
    return {"seed": seed, "took_s": time.monotonic() - began, "rounds": rows, "accounts": accounts}
