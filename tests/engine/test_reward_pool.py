"""The reward pool with rewards that raise, hang, die and lie, in real processes."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from engine.reward_pool import RewardError, RewardPool

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 0.5


class Unspeakable(Exception):
    def __str__(self):
        raise ValueError("no words")


def misbehave(task: str, answer: str, response: str) -> float:
    """Does what the response says."""
    match response.split():
        case ["raise"]:
            raise KeyError("no\nsuch key")
        case ["exit", code]:
            sys.exit(int(code))
        case ["die", code]:
            os._exit(int(code))
        case ["killed"]:
            os.kill(os.getpid(), signal.SIGKILL)
        case ["hang"]:
            while True:
                pass
        case ["hang", "deaf"]:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(3600)
        case ["interrupt"]:
            raise KeyboardInterrupt
        case ["cancel"]:
            raise asyncio.CancelledError
        case ["unspeakable"]:
            raise Unspeakable
        case ["huge"]:
            return 10**400
        case ["text"]:
            return "1.0"
        case ["pid"]:
            return os.getpid()
        case ["modules", name]:
            return float(name in sys.modules)
        case _:
            return float(response)


def run_pool(*responses: str, timeout_s: float = TIMEOUT_S, num_processes: int = 1) -> list:
    """Outcome of each response, all asked for at once: a reward or the RewardError."""

    async def ask() -> list:
        pool = RewardPool("addition", timeout_s, num_processes, misbehave)
        try:
            return await asyncio.gather(*(pool.score("", r) for r in responses), return_exceptions=True)
        finally:
            pool.close()

    return asyncio.run(ask())


def gone(pid: int, within_s: float) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        deadline = time.monotonic() + within_s
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
    return True


def test_reward_pool_come_back_to_their_own_callers():
    numbers = [str(number) for number in range(300)]
    assert run_pool(*numbers) == [float(number) for number in numbers]
    assert run_pool(*numbers, num_processes=2) == [float(number) for number in numbers]


@pytest.mark.parametrize(
    ("culprit", "message"),
    [
        ("raise", r"KeyError: 'no\nsuch key'"),
        ("exit 0", "SystemExit: 0"),
        ("interrupt", "KeyboardInterrupt"),
        ("cancel", "CancelledError"),
        ("unspeakable", "Unspeakable: <exception str() failed>"),
        ("huge", "OverflowError: int too large to convert to float"),
        ("nan", "the reward is nan, not a finite number"),
        ("inf", "the reward is inf, not a finite number"),
        ("text", "the reward is '1.0', not a finite number"),
        ("die 3", "its process died"),
        ("killed", "its process died"),
        ("die 0", "timed out after 0.5 s"),
        ("hang", "timed out after 0.5 s"),
    ],
)
def test_one_bad_reward_fails_alone(culprit, message):
    *innocents, bad = run_pool("0.25", "0.5", "0.75", culprit)
    assert innocents == [0.25, 0.5, 0.75]
    assert isinstance(bad, RewardError)
    assert message in str(bad)
    assert "\n" not in str(bad)


def test_several_bad_rewards_fail_each_for_its_own_reason():
    raised, good, died, hung = run_pool("raise", "0.5", "die 3", "hang")
    assert good == 0.5
    assert ["KeyError" in str(raised), "died" in str(died), "timed out" in str(hung)] == [True] * 3


def test_a_reward_that_ignores_sigterm_is_killed():
    (hung,) = run_pool("hang deaf")
    assert "timed out" in str(hung)


def test_the_pool_survives_a_process_killed_while_idle():
    async def ask() -> list[float]:
        pool = RewardPool("addition", 10.0, score_function=misbehave)
        rewards = []
        for _ in range(2):
            pid = await pool.score("", "pid")
            os.kill(int(pid), signal.SIGKILL)
            await asyncio.sleep(0.5)
            rewards.append(await pool.score("", "0.5"))
        pool.close()
        return rewards

    assert asyncio.run(ask()) == [0.5, 0.5]


def test_a_cancelled_caller_does_not_cancel_the_others():
    async def ask() -> list:
        pool = RewardPool("addition", 10.0, score_function=misbehave)
        callers = [asyncio.create_task(pool.score("", text)) for text in ("1", "2", "3")]
        await asyncio.sleep(0)
        callers[1].cancel()
        outcomes = await asyncio.gather(*callers, return_exceptions=True)
        pool.close()
        return outcomes

    first, second, third = asyncio.run(ask())
    assert (first, third) == (1.0, 3.0)
    assert isinstance(second, asyncio.CancelledError)


def test_close_ends_the_processes_whatever_they_are_doing():
    async def ask() -> list[int]:
        pool = RewardPool("addition", 60.0, 2, misbehave)
        pid = await pool.score("", "pid")
        hanging = asyncio.create_task(pool.score("", "hang"))
        await asyncio.sleep(0.3)
        processes = [p for p in psutil.Process().children() if p.cmdline()[0] == "rewards"]
        assert pid in [process.pid for process in processes]
        pool.close()
        with pytest.raises(RuntimeError, match="closed"):
            await pool.score("", "1")
        hanging.cancel()
        return [process.pid for process in processes if process.is_running()]

    started = time.monotonic()
    assert asyncio.run(ask()) == []
    assert time.monotonic() - started < 10


PARENT = """
import asyncio, multiprocessing, sys, turtledemo
sys.path.insert(0, {here!r})
from engine.reward_pool import RewardPool
from test_reward_pool import misbehave

async def ask(end):
    pool = RewardPool("addition", 60.0, score_function=misbehave)
    print(int(await pool.score("", "pid")), flush=True)
    if end == "raise":
        raise ValueError("no close")
    if end == "modules":
        for name in ("turtledemo", "torch", "data.rewards"):
            assert "turtledemo" in sys.modules
            print(int(await pool.score("", f"modules {{name}}")), flush=True)
        pool.close()
        return
    await pool.score("", "hang")

def child(end):
    asyncio.run(ask(end))

if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=child, args=(sys.argv[1],))
    process.start()
    print(process.pid, flush=True)
    process.join()
    sys.exit(process.exitcode)
"""


def start_parent(tmp_path: Path, end: str) -> tuple[subprocess.Popen, list[int]]:
    """A process, its child that owns a pool, and the pids of that child and its reward process."""
    script = tmp_path / "parent.py"
    script.write_text(PARENT.format(here=str(Path(__file__).parent)))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, script, end], stdout=subprocess.PIPE, text=True, env=environment)
    return process, [int(process.stdout.readline()) for _ in range(2)]


def test_reward_processes_end_within_seconds_of_their_parents_sigkill(tmp_path):
    process, (owner, reward_process) = start_parent(tmp_path, "hang")
    time.sleep(0.3)
    assert psutil.pid_exists(reward_process)
    os.kill(owner, signal.SIGKILL)
    assert gone(reward_process, within_s=5)
    process.wait(10)


def test_reward_processes_import_neither_their_parents_main_module_nor_torch(tmp_path):
    process, _ = start_parent(tmp_path, "modules")
    assert [process.stdout.readline().strip() for _ in range(3)] == ["0", "0", "1"]
    assert process.wait(10) == 0


def test_a_parent_that_ends_by_an_exception_does_not_wait_for_ever(tmp_path):
    process, (_, reward_process) = start_parent(tmp_path, "raise")
    assert process.wait(10) == 1
    assert gone(reward_process, within_s=1)


def test_a_score_function_of_the_main_module_is_refused():
    def function(task: str, answer: str, response: str) -> float:
        return 0.0

    function.__module__ = "__main__"
    with pytest.raises(ValueError, match="must live in a module"):
        RewardPool("addition", 1.0, score_function=function)


def test_the_default_score_function_scores_in_the_pool():
    async def ask() -> list[float]:
        pool = RewardPool("addition", 10.0)
        rewards = await asyncio.gather(pool.score("a1 b2", "a 1 b 2"), pool.score("a1 b2", "a1 b3"))
        pool.close()
        return rewards

    assert asyncio.run(ask()) == [1.0, 0.0]


def test_outside_of_an_event_loop_each_response_has_a_future_whatever_becomes_of_the_others():
    pool = RewardPool("addition", TIMEOUT_S, score_function=misbehave)
    scored = [pool.begin("", response) for response in ("1.5", "raise", "hang", "die 3", "2.5")]
    assert scored[0].result(30) == [1.5] and scored[4].result(30) == [2.5]
    assert scored[1].result() == ["KeyError: 'no\\nsuch key'"]
    assert isinstance(scored[2].exception(), TimeoutError) and scored[3].exception() is not None
    pool.close()
