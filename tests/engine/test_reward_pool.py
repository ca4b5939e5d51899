"""The reward pool with rewards that raise, hang, die and lie, in real processes."""

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys

import psutil
import pytest
import user_rewards
from programs import ROOT
from reward_outcomes import FILE, outcomes, texts

from asyncrl.engine import reward_pool
from asyncrl.engine.reward_pool import RewardPool
from asyncrl.engine.score import MAX_FAILURE, Failed

EVALUATED = texts("evaluated")
DEATH, HANG = "its process died", "timed out after 1 s"
BAD = {
    "float('nan')": "the reward is nan, not a finite number or a dict of them",
    "'1.0'": "the reward is '1.0', not a finite number or a dict of them",
    "[1.0, 0.0]": "the reward is [1.0, 0.0], not a finite number or",
    "None": "the reward is None, not a finite number",
    "{}": "the reward is {}, not a finite number",
    "{'right': 1.0, 'wrong': float('inf')}": "the part 'wrong' is inf, not a finite number",
    "{'right': '1.0'}": "the part 'right' is '1.0', not a finite number",
    "{3: 1.0}": "1 parts, [3]; allowed are 64 printable names",
    "{'x' * 1000: 1.0}": "printable names of at most 128 characters",
    "{'mean': 1.0}": "none of them mean, std, zero_variance_groups",
    "{str(i): 1.0 for i in range(1000)}": "1000 parts",
    "-1e13": "the reward is -1e+13, allowed is -1e+12 to 1e+12; scale it down",
    "{'large': 1e300}": "the part 'large' is 1e+300, allowed is -1e+12 to 1e+12; scale it down",
    "10**400": "OverflowError: int too large to convert to float",
    r"{}['no\nsuch key']": r", line LINE: KeyError: 'no\nsuch key'",
    r"throw(ValueError('\ud800' * 1000))": r"ValueError: \ud800\ud800",
    "throw(Unspeakable)": "Unspeakable: <exception str() failed>",
    "throw(KeyboardInterrupt)": "KeyboardInterrupt",
    "throw(asyncio.CancelledError)": "CancelledError",
    "sys.exit(3)": "SystemExit: 3",
    "os._exit(0)": DEATH,
    "os._exit(3)": DEATH,
    "ctypes.string_at(0)": DEATH,
    "time.sleep(3600)": HANG,
    "[signal.signal(signal.SIGTERM, signal.SIG_IGN), time.sleep(3600)]": HANG,
}
"""Responses, and the reason that each fails for."""
BAD_ASYNC = {"asyncio.sleep(3600)": HANG, "ignore_cancellation()": HANG}
SHARED = [text for text in BAD if text.startswith(("{}", "os._exit(3)", "time.sleep"))]
"""Those that async functions are tried with, too."""


@pytest.mark.parametrize("name", ["evaluated", "evaluated_async"])
def test_each_response_has_its_own_outcome_whatever_the_others_do(name, monkeypatch):
    monkeypatch.setattr(reward_pool, "_GRACE_S", 0.5)
    bad = BAD if name == "evaluated" else {text: BAD[text] for text in SHARED} | BAD_ASYNC
    good = [f"{number / 4}" for number in range(8 * len(bad))]
    responses = [*good, *bad]
    random.Random(0).shuffle(responses)
    found = dict(zip(responses, outcomes(texts(name), *responses, num_processes=4), strict=True))
    assert [found[response] for response in good] == [(float(text), {}) for text in good]
    line = getattr(user_rewards, name).__code__.co_firstlineno + (2 if name == "evaluated" else 3)
    for response, reason in bad.items():
        error = found[response]
        assert isinstance(error, Failed), response
        assert str(error).startswith(f"{FILE}:{name}"), error
        assert reason.replace("LINE", str(line)) in str(error)
        assert "\n" not in str(error) and len(str(error).encode()) <= MAX_FAILURE


def test_the_largest_reward_comes_back_and_a_sum_beyond_it_fails():
    assert outcomes(EVALUATED, "-1e12") == [(-1e12, {})]
    (error,) = outcomes(texts("evaluated*2"), "-1e12")
    assert "the sum of rewards is -2e+12, allowed is -1e+12 to 1e+12" in str(error)


def test_one_process_takes_async_rewards_on_while_others_wait():
    """One after the other takes minutes."""
    responses = [f"later({number}.0, 2)" for number in range(250)]
    scores = outcomes(texts("evaluated_async"), *responses, timeout_s=60.0, num_processes=1)
    assert scores == [(float(number), {}) for number in range(250)]


def reward_processes() -> list[psutil.Process]:
    """The template first, then what was forked from it."""
    children = psutil.Process().children(recursive=True)
    alive = [child for child in children if child.status() != psutil.STATUS_ZOMBIE]
    return [process for process in alive if process.cmdline()[:1] == ["rewards"]]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_processes_killed_or_stopped_while_idle_are_replaced_at_the_cost_of_a_time_limit(
    number, monkeypatch
):
    monkeypatch.setattr(reward_pool, "_MAX_FORK_S", 1.0)

    async def ask() -> list:
        pool = RewardPool("addition", EVALUATED, 1.0, 2)
        await asyncio.gather(*(pool.score("", "0.5") for _ in range(8)))
        for process in reward_processes():
            process.send_signal(number)
        scores = (pool.score("", "0.25") for _ in range(20))
        found = await asyncio.gather(*scores, return_exceptions=True)
        hanging = (pool.score("", "time.sleep(3600)") for _ in range(2))
        await asyncio.gather(*hanging, return_exceptions=True)  # needs new ones
        assert await pool.score("", "0.75") == (0.75, {})
        pool.close()
        return found

    failed = [outcome for outcome in asyncio.run(ask()) if outcome != (0.25, {})]
    assert len(failed) <= (2 if number == signal.SIGSTOP else 0), "a stopped one may cost its own"
    assert all("timed out" in str(error) for error in failed)


def test_a_cancelled_caller_cancels_no_other_and_a_closed_pool_leaves_no_process():
    async def ask() -> list[int]:
        pool = RewardPool("addition", EVALUATED, 60.0, 1)
        callers = [asyncio.create_task(pool.score("", text)) for text in ("1.0", "2.0", "3.0")]
        await asyncio.sleep(0)
        callers[1].cancel()
        first, second, third = await asyncio.gather(*callers, return_exceptions=True)
        assert (first, third) == ((1.0, {}), (3.0, {}))
        assert isinstance(second, asyncio.CancelledError)
        hanging = asyncio.create_task(pool.score("", "time.sleep(3600)"))
        await asyncio.sleep(0.3)
        hanging.cancel()  # with its process, as it would keep the next one waiting
        assert await asyncio.wait_for(pool.score("", "4.0"), 30) == (4.0, {})
        processes = reward_processes()
        pool.close()
        with pytest.raises(RuntimeError, match="closed"):
            await pool.score("", "1.0")
        return [process.pid for process in processes]

    pids = asyncio.run(ask())
    assert len(pids) >= 2 and are_gone(pids)


def are_gone(pids: list[int]) -> bool:
    """Whether all processes end within seconds."""
    processes = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            processes.append(psutil.Process(pid))
    _, alive = psutil.wait_procs(processes, timeout=5)
    return all(process.status() == psutil.STATUS_ZOMBIE for process in alive)


OWNER = f"""
import asyncio, sys, turtledemo
import psutil
from asyncrl.engine.reward_pool import RewardPool

async def ask():
    pool = RewardPool("addition", [{EVALUATED[0]!r}], 60.0)
    for name in ("turtledemo", "torch", "asyncrl.engine.score"):
        assert "turtledemo" in sys.modules
        assert await pool.score("", f"float({{name!r}} in sys.modules)") == (name[0] == "a", {{}})
    hanging = asyncio.create_task(pool.score("", "time.sleep(3600)"))
    await asyncio.sleep(0.3)
    print(*(child.pid for child in psutil.Process().children(recursive=True)), flush=True)
    await hanging

asyncio.run(ask())
"""


def test_reward_processes_import_neither_main_nor_torch_and_end_with_their_owner():
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    pids = [int(pid) for pid in owner.stdout.readline().split()]
    assert len(pids) >= 2
    owner.kill()
    owner.wait(10)
    assert are_gone(pids)
