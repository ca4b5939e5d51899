"""Kills and stops processes of real runs at random moments, resumes them, and proves that nothing was lost.

A round is one fault: a signal for one process in one phase. The run is to go on, or to end within its timeout with a
line that names the cause; then it is resumed. When a run has made all its steps its account is checked, and the next
one starts.
"""

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from real_job import ROOT, Job, assert_ledger_balances, total

from asyncrl.config import Config
from asyncrl.tasks import load_task
from asyncrl.weights.models import load_tokenizer, resolve_model

TIMEOUT_S = 60
"""The runs' --timeout-s; what is stopped is killed after half of it."""
LIMIT_S = 2 * TIMEOUT_S
"""Longest time from a fault to an end of the run, or to its recovery."""
ACCURACY = 0.9
"""What the default job reaches on the held-out problems: 0.956 ± 0.016 unbroken (docs/results.md)."""
PROGRAM = [sys.executable, "-m", "torch.distributed.run", "--standalone", "train_async.py"]
OPTIONS = {"save-every": 5, "timeout-s": TIMEOUT_S}
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
    """All processes that were seen of its last start."""

    @property
    def path(self) -> Path:
        return self.folder / "run"

    def start(self) -> Job:
        """Start it, or go on with it from its newest checkpoint, if there is one."""
        if self.has_saved():
            arguments = [f"--resume={self.path}"]
        else:
            # it ended before its first checkpoint: there is nothing to go on from
            if self.path.exists():
                self.path.rename(self.folder / f"void_{self.num_starts}")
            chosen = {"runs-dir": self.folder, "run-name": "run", **self.options}
            arguments = [f"--{name}={value}" for name, value in chosen.items() if value is not True]
            arguments += [f"--{name}" for name, value in chosen.items() if value is True]
        output = self.folder / f"output_{self.num_starts}.txt"
        self.num_starts += 1
        with open(output, "w") as file:
            process = subprocess.Popen(
                [*PROGRAM, *arguments], cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
                env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
            )  # fmt: skip
        self.job, self.seen = Job(process, self.path, output), []
        return self.job

    def has_saved(self) -> bool:
        """Whether there is a whole checkpoint."""
        return any(self.path.glob("checkpoints/step_*[0-9]/resume/manifest.json"))

    def running(self) -> Job:
        """The job, started if it is not running."""
        if self.job is None or self.job.process.poll() is not None:
            return self.start()
        return self.job

    def stop(self) -> bool:
        """Have it end as a user would, after the running step. Returns whether there are steps left to make."""
        if self.job is None or self.job.process.poll() is not None:
            return True
        self.look()
        self.job.process.send_signal(signal.SIGTERM)
        code = self.job.wait(LIMIT_S)
        self.assert_nothing_is_left()
        return code != 0

    def kill(self) -> None:
        """Leave nothing of a run that did what it should not."""
        self.look()
        for process in self.seen:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def look(self) -> list[psutil.Process]:
        """All its processes that are alive; none when it has ended."""
        if self.job.process.poll() is not None:
            return []
        with contextlib.suppress(psutil.NoSuchProcess):
            agent = psutil.Process(self.job.process.pid)
            alive = [agent, *agent.children(recursive=True)]
            self.seen += [process for process in alive if process not in self.seen]
            return alive
        return []

    def assert_nothing_is_left(self) -> None:
        """All processes that were ever seen of its last start are gone within seconds."""
        _, alive = psutil.wait_procs(self.seen[1:], timeout=20)
        assert not alive, f"left behind: {[process.cmdline()[:1] for process in alive]}"

    def num_steps(self) -> int:
        """Steps that are recorded; fewer after a resume, as records are cut back to the checkpoint."""
        return self.job.num_steps()


def wait_until(condition: Callable[[], object], what: str, limit_s: float = LIMIT_S):
    """Poll until the condition gives something, and return it."""
    deadline = time.monotonic() + limit_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what}: nothing after {limit_s:g} s"
        time.sleep(0.02)
    return found


def wait_for_phase(run: Run, fault: Fault) -> bool:
    """Have the run be where the fault is to come. Returns False if it ended on the way, by itself."""
    if fault.phase == "start" and not run.stop():
        return False
    job, newest = run.running(), [run.num_steps()]
    left_over = set(run.path.glob("checkpoints/*.tmp"))

    def is_reached() -> bool:
        step, before = run.num_steps(), newest[0]
        newest[0] = step  # it may become less: records are cut back when a run goes on
        if fault.phase == "checkpoint":
            # of a second one: with none before it a run begins anew, and does not resume
            begun = set(run.path.glob("checkpoints/*.tmp")) - left_over
            return bool(begun) and run.has_saved()
        is_due = fault.phase != "evaluation" or step % Config().eval_every == 0
        return fault.phase == "start" or (step > before and is_due)

    wait_until(
        lambda: job.process.poll() is not None or is_reached(), f"{fault.phase} was not reached"
    )
    time.sleep(fault.delay_s)
    return job.process.poll() is None


def find_victim(run: Run, fault: Fault, rng: random.Random) -> psutil.Process | None:
    """A process of the kind, as soon as there is one; None if the run ends before."""
    title = VICTIMS[fault.victim]

    def find() -> list[psutil.Process]:
        alive = run.look()
        if title is None or not alive:
            return alive[:1] or [None]
        return [process for process in alive if _title(process).startswith(title)]

    return rng.choice(wait_until(find, f"no {fault.victim}"))


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
    began = time.monotonic()
    row = {
        "fault": str(fault),
        "victim": fault.victim,
        "signal": fault.number.name,
        "phase": fault.phase,
    }
    if not wait_for_phase(run, fault) or (process := find_victim(run, fault, rng)) is None:
        assert run.job.process.returncode == 0, run.job.output()[-3000:]
        return row | {"outcome": "had finished before", "took_s": time.monotonic() - began}
    assert_only_the_agent_listens_elsewhere(run)
    at, num_steps, said = time.monotonic(), run.num_steps(), len(run.job.output())
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(fault.number)
    outcome = wait_until(
        lambda: outcome_of(run, process, num_steps), f"{fault}: neither recovered nor ended"
    )
    row |= {"step": num_steps, "outcome": outcome, "took_s": time.monotonic() - at}
    if outcome == "ended":
        row["cause"] = cause_of_end(run, fault, run.job.output()[said:])
        run.assert_nothing_is_left()
    return row


def assert_only_the_agent_listens_elsewhere(run: Run) -> None:
    """All that listens does so on loopback, but for torchrun's own store."""
    for process in run.look()[1:]:
        with contextlib.suppress(psutil.NoSuchProcess):
            sockets = [c for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
            assert all(c.laddr.ip in ("127.0.0.1", "::1") for c in sockets), (
                process.cmdline(),
                sockets,
            )


def outcome_of(run: Run, process: psutil.Process, num_steps: int) -> str | None:
    """How the run has come out of a fault: it ended, or the process is gone and steps were made without it."""
    run.look()
    if (code := run.job.process.poll()) is not None:
        return "finished" if code == 0 else "ended"
    if process.pid == run.job.process.pid:
        return None  # gone, and some of its threads not yet: the run ends with it
    return "recovered" if is_gone(process) and run.num_steps() >= num_steps + 3 else None


def cause_of_end(run: Run, fault: Fault, text: str) -> str:
    """The line that names the fault, of what was said since; who was started here and killed says it by its status."""
    code = run.job.process.returncode
    if fault.number == signal.SIGSTOP:
        pattern = r"error: .* was stopped \(SIGSTOP\) for \d+ s, and is killed"
    else:
        pattern = r".*(SIGKILL|exitcode: -9|the engine is dead|Engine core).*"
    if found := re.search(pattern, text):
        return found[0].strip()[:200]
    assert code == -signal.SIGKILL, f"{fault}: no cause in\n{text[-3000:]}"
    return "killed itself: status -9"


def finish(run: Run) -> dict:
    """Go on without faults to the end, and check the account."""
    job = run.running()
    run.look()
    code = job.wait(600)
    assert code == 0, job.output()[-4000:]
    return check_account(run)


def check_account(run: Run) -> dict:
    """Prove by the records of a finished run that each step was made once, and each problem trained on once or dropped
    for a counted reason. Returns its numbers."""
    config = Config.from_dict(json.loads((run.path / "run.json").read_text())["config"])
    metrics, steps = run.job.metrics(), run.job.events("step")
    assert [line["step"] for line in metrics] == list(range(1, config.steps + 1))
    assert [event["step"] for event in steps] == list(range(1, config.steps + 1))
    assert_ledger_balances(metrics)
    last = metrics[-1]
    consumed = [group for event in steps for group in event["groups"]]
    assert len(consumed) == len(set(consumed)) == config.steps * config.groups_per_step
    assert last["ledger/groups_consumed"] == len(consumed)
    dropped = total(last, "ledger/groups_dropped_")
    missing = last["ledger/groups_issued"] - len(consumed)
    assert missing == dropped + last["ledger/groups_resident"]
    assert max(consumed) < last["ledger/groups_issued"], "a group was never issued"
    twice = problems_too_often(run, config, num_problems=last["ledger/groups_issued"])
    assert not twice, f"trained on more often than it is among the problems: {twice}"
    assert max(line["staleness/max"] for line in metrics) <= config.max_staleness
    accuracy = last.get("eval/accuracy")
    assert not config.eval_every or accuracy >= ACCURACY, accuracy
    return {
        "starts": run.num_starts, "consumed": len(consumed), "dropped": dropped, "accuracy": accuracy,
        "restarts": last["rollout/restarts"],
    }  # fmt: skip


def problems_too_often(run: Run, config: Config, num_problems: int) -> Counter:
    """Prompts of recorded batches that were trained on more often than they are among the problems handed out."""
    from extras.recording import batch_path, read_batch  # torch

    task, tokenizer = (
        load_task(config.task, config.seed),
        load_tokenizer(resolve_model(config.model, config.task)),
    )
    problems = [task.train_problem(index) for index in range(num_problems)]
    handed_out = Counter(tuple(task.encode_prompt(problem, tokenizer)) for problem in problems)
    trained = Counter()
    for step in range(1, config.steps + 1):
        for group in read_batch(batch_path(run.path, step), step):
            first = group.trajectories[0]
            trained[tuple(first.tokens[: first.loss_mask.argmax()].tolist())] += 1
    return trained - handed_out


def run_rounds(
    folder: Path, num_rounds: int, seed: int, options: dict | None = None, faults=None
) -> dict:
    """Make rounds, then finish the last run; prints a line per round. Returns all that was measured."""
    rng, rows, accounts = random.Random(seed), [], []
    run, began = None, time.monotonic()
    for number in range(num_rounds):
        fault = faults[number] if faults else draw(rng)
        if run is None:
            place = folder / f"run_{len(accounts)}"
            place.mkdir(parents=True)
            run = Run(
                place, OPTIONS | {"record": True, "seed": seed + len(accounts)} | (options or {})
            )
        try:
            rows.append(do(run, fault, rng))
        except AssertionError:
            run.kill()
            raise
        print(f"round {number + 1}/{num_rounds}  {rows[-1]}", flush=True)
        if rows[-1]["outcome"] in ("finished", "had finished before"):
            accounts.append(check_account(run))
            print(f"account: {accounts[-1]}", flush=True)
            run = None
    if run is not None:
        accounts.append(finish(run))
        print(f"account: {accounts[-1]}", flush=True)
    return {"seed": seed, "took_s": time.monotonic() - began, "rounds": rows, "accounts": accounts}
