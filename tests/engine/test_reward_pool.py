"""The reward pool with rewards that raise, hang, die and lie, in real processes."""

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from asyncrl.engine import reward_pool
from asyncrl.engine.reward_pool import RewardPool
from asyncrl.engine.score import Failed

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 0.5
HALF = 0.5, {}
MISBEHAVE = [f"{__file__}:misbehave"]


class Unspeakable(Exception):
    def __str__(self):
        raise ValueError("no words")


def misbehave(response: str) -> float:
    """Does what the response says."""
    match response.split():
        case ["raise"]:
            raise KeyError("no\nsuch key")
        case ["exit", code]:
            sys.exit(int(code))
        case ["die", code]:
            os._exit(int(code))
        case ["crash"]:
            ctypes.string_at(0)
        case ["hang"]:
            while True:
                pass
        case ["sleep"]:
            time.sleep(3600)
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
        case ["modules", name]:
            return float(name in sys.modules)
        case _:
            return float(response)


def run_pool(*responses: str, timeout_s: float = TIMEOUT_S, num_processes: int = 1) -> list:
    """Outcome of each response, all asked for at once: a reward or the Failed."""

    async def ask() -> list:
        pool = RewardPool("addition", MISBEHAVE, timeout_s, num_processes)
        try:
            found = await asyncio.gather(
                *(pool.score("", r) for r in responses), return_exceptions=True
            )
            return [outcome if isinstance(outcome, Exception) else outcome[0] for outcome in found]
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
        ("crash", "its process died"),
        ("die 0", "its process died"),
        ("hang", "timed out after 0.5 s"),
    ],
)
def test_one_bad_reward_fails_alone(culprit, message):
    *innocents, bad = run_pool("0.25", "0.5", "0.75", culprit)
    assert innocents == [0.25, 0.5, 0.75]
    assert isinstance(bad, Failed)
    assert message in str(bad)
    assert "\n" not in str(bad)


def test_several_bad_rewards_fail_each_for_its_own_reason():
    raised, good, died, hung = run_pool("raise", "0.5", "die 3", "hang")
    assert good == 0.5
    assert ["KeyError" in str(raised), "died" in str(died), "timed out" in str(hung)] == [True] * 3


def test_a_reward_that_ignores_sigterm_is_killed():
    (hung,) = run_pool("hang deaf")
    assert "timed out" in str(hung)


def reward_processes() -> list[psutil.Process]:
    """The template first, then what was forked from it."""
    alive = (
        p for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE
    )
    return [p for p in alive if p.cmdline()[:1] == ["rewards"]]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("which", ["scorers", "all"])
def test_processes_killed_or_stopped_while_idle_are_replaced_at_the_cost_of_a_time_limit(
    number, which, monkeypatch
):
    monkeypatch.setattr(reward_pool, "_MAX_FORK_S", 1.0)

    async def ask() -> tuple[list[float], float]:
        pool = RewardPool("addition", MISBEHAVE, 1.0, 2)
        assert await asyncio.gather(*(pool.score("", "0.5") for _ in range(8))) == [HALF] * 8
        template, *scorers = reward_processes()
        for process in {"scorers": scorers, "all": [template, *scorers]}[which]:
            process.send_signal(number)
        begun = time.monotonic()
        outcomes = await asyncio.gather(
            *(pool.score("", "0.25") for _ in range(20)), return_exceptions=True
        )
        taken_s = time.monotonic() - begun
        # needs new ones
        await asyncio.gather(*(pool.score("", "hang") for _ in range(2)), return_exceptions=True)
        assert await pool.score("", "0.75") == (0.75, {})
        pool.close()
        return outcomes, taken_s

    outcomes, taken_s = asyncio.run(ask())
    failed = [outcome for outcome in outcomes if outcome != (0.25, {})]
    assert len(failed) <= (2 if number == signal.SIGSTOP else 0), (
        "a stopped process may cost what it was given"
    )
    assert all("timed out" in str(error) for error in failed)
    assert taken_s < 10, "the limit of a reward, then of a fork"


def test_answers_that_hang_keep_only_their_own_process_from_the_others():
    async def ask() -> tuple[list, float]:
        pool = RewardPool("addition", MISBEHAVE, 1.0, 4)
        await asyncio.gather(*(pool.score("", "0.5") for _ in range(8)))
        begun = time.monotonic()
        responses = (["0.5"] * 9 + ["sleep"]) * 8
        outcomes = await asyncio.gather(
            *(pool.score("", r) for r in responses), return_exceptions=True
        )
        pool.close()
        return outcomes, time.monotonic() - begun

    outcomes, taken_s = asyncio.run(ask())
    assert outcomes.count(HALF) == 72 and sum("timed out" in str(o) for o in outcomes) == 8
    assert taken_s < 4, "eight, four at a time; one after the other takes 8 s"


def test_a_cancelled_caller_does_not_cancel_the_others():
    async def ask() -> list:
        pool = RewardPool("addition", MISBEHAVE, 10.0)
        callers = [asyncio.create_task(pool.score("", text)) for text in ("1", "2", "3")]
        await asyncio.sleep(0)
        callers[1].cancel()
        outcomes = await asyncio.gather(*callers, return_exceptions=True)
        pool.close()
        return outcomes

    first, second, third = asyncio.run(ask())
    assert (first, third) == ((1.0, {}), (3.0, {}))
    assert isinstance(second, asyncio.CancelledError)


def test_close_ends_the_processes_whatever_they_are_doing():
    async def ask() -> list[int]:
        pool = RewardPool("addition", MISBEHAVE, 60.0, 2)
        await asyncio.gather(*(pool.score("", "1") for _ in range(9)))
        hanging = asyncio.create_task(pool.score("", "hang"))
        await asyncio.sleep(0.3)
        processes = reward_processes()
        assert len(processes) >= 3, "a template, and two processes that score"
        pool.close()
        with pytest.raises(RuntimeError, match="closed"):
            await pool.score("", "1")
        hanging.cancel()
        return [process.pid for process in processes if not gone(process.pid, within_s=5)]

    started = time.monotonic()
    assert asyncio.run(ask()) == []
    assert time.monotonic() - started < 10


PARENT = """
import asyncio, multiprocessing, sys, turtledemo
from asyncrl.engine.reward_pool import RewardPool

async def ask(end):
    pool = RewardPool("addition", [{misbehave!r}], 60.0)
    print(int((await pool.score("", "1"))[0]), flush=True)
    if end == "raise":
        raise ValueError("no close")
    if end == "modules":
        for name in ("turtledemo", "torch", "asyncrl.engine.score"):
            assert "turtledemo" in sys.modules
            print(int((await pool.score("", f"modules {{name}}"))[0]), flush=True)
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


def start_parent(tmp_path: Path, end: str) -> tuple[subprocess.Popen, int, list[int]]:
    """A process, the pid of its child that owns a pool, and those of its reward processes."""
    script = tmp_path / "parent.py"
    script.write_text(PARENT.format(misbehave=MISBEHAVE[0]))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, script, end], stdout=subprocess.PIPE, text=True, env=environment
    )
    owner, reward = (int(process.stdout.readline()) for _ in range(2))
    assert reward == 1
    with contextlib.suppress(psutil.NoSuchProcess):
        return (
            process,
            owner,
            [child.pid for child in psutil.Process(owner).children(recursive=True)],
        )
    return process, owner, []


def test_reward_processes_end_within_seconds_of_their_parents_sigkill(tmp_path):
    process, owner, reward_processes = start_parent(tmp_path, "hang")
    time.sleep(0.3)
    assert len(reward_processes) >= 2 and all(map(psutil.pid_exists, reward_processes))
    os.kill(owner, signal.SIGKILL)
    assert all(gone(pid, within_s=5) for pid in reward_processes)
    process.wait(10)


def test_reward_processes_import_neither_their_parents_main_module_nor_torch(tmp_path):
    process, *_ = start_parent(tmp_path, "modules")
    assert [process.stdout.readline().strip() for _ in range(3)] == ["0", "0", "1"]
    assert process.wait(10) == 0


def test_a_parent_that_ends_by_an_exception_does_not_wait_for_ever(tmp_path):
    process, _, reward_processes = start_parent(tmp_path, "raise")
    assert process.wait(10) == 1
    assert all(gone(pid, within_s=5) for pid in reward_processes)


def test_the_default_score_function_scores_in_the_pool():
    async def ask() -> list[float]:
        pool = RewardPool("addition", [], 10.0)
        rewards = await asyncio.gather(pool.score("a1 b2", "a 1 b 2"), pool.score("a1 b2", "a1 b3"))
        pool.close()
        return rewards

    assert asyncio.run(ask()) == [(1.0, {}), (0.0, {})]


def test_in_the_event_loop_of_another_thread_each_response_has_a_future_whatever_becomes_of_the_others():
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    pool = RewardPool("addition", MISBEHAVE, TIMEOUT_S)
    responses = ("1.5", "raise", "hang", "die 3", "2.5")
    scored = [
        asyncio.run_coroutine_threadsafe(pool.score("", response), loop) for response in responses
    ]
    assert scored[0].result(30) == (1.5, {}) and scored[4].result(30) == (2.5, {})
    failures = [str(future.exception(30)) for future in scored[1:4]]
    line = misbehave.__code__.co_firstlineno + 4
    why = (
        f", line {line}: KeyError: 'no\\nsuch key'",
        ": timed out after 0.5 s",
        ": its process died",
    )
    assert failures == [MISBEHAVE[0] + reason for reason in why]
    pool.close()
    loop.call_soon_threadsafe(loop.stop)
