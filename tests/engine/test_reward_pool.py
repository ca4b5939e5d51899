"""The reward pool with rewards that raise, hang, die and lie, in real processes."""

import asyncio
import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import user_rewards
from reward_outcomes import FILE, outcomes, texts

from asyncrl.engine import reward_pool
from asyncrl.engine.reward_pool import RewardPool, _Died, _Scorer
from asyncrl.engine.score import MAX_FAILURE, Failed

ROOT = Path(__file__).parents[2]
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


@pytest.mark.parametrize("name", ["evaluated", "evaluated_async"])
def test_each_response_has_its_own_outcome_whatever_the_others_do(name, monkeypatch):
    monkeypatch.setattr(reward_pool, "_GRACE_S", 0.5)
    bad = BAD if name == "evaluated" else BAD | BAD_ASYNC
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


@pytest.mark.parametrize("name", ["evaluated", "evaluated_async"])
def test_the_largest_reward_comes_back_and_a_sum_beyond_it_fails(name):
    assert outcomes(texts(name), "-1e12") == [(-1e12, {})]
    (error,) = outcomes(texts(f"{name}*2"), "-1e12")
    assert "the sum of rewards is -2e+12, allowed is -1e+12 to 1e+12" in str(error)


def test_a_plain_reward_costs_little_more_than_its_own_time():
    """0.2 ms on an idle core; the bound leaves room for a busy one."""
    began = time.monotonic()
    assert outcomes(EVALUATED, *["0.5"] * 2000, timeout_s=5.0) == [(0.5, {})] * 2000
    assert time.monotonic() - began < 8


def test_one_process_takes_async_rewards_on_while_others_wait():
    async def ask() -> float:
        pool = RewardPool("addition", texts("evaluated_async"), 5.0, 1)
        await pool.score("", "0.0")
        began = time.monotonic()
        first = [asyncio.create_task(pool.score("", "later(1.0, 2)")) for _ in range(2)]
        await asyncio.sleep(0.5)
        responses = [f"later({number}.0, 2)" for number in range(250)]
        scores = await asyncio.gather(*(pool.score("", response) for response in responses))
        assert scores == [(float(number), {}) for number in range(250)]
        await asyncio.gather(*first)
        pool.close()
        return time.monotonic() - began

    assert asyncio.run(ask()) < 7, "one after the other takes minutes, batch after batch 6 s more"


def test_responses_that_hang_keep_only_their_own_process_from_the_others():
    began = time.monotonic()
    responses = (["0.5"] * 9 + ["time.sleep(3600)"]) * 16
    found = outcomes(EVALUATED, *responses, num_processes=8)
    assert found.count((0.5, {})) == 144 and sum(HANG in str(outcome) for outcome in found) == 16
    assert time.monotonic() - began < 12, "eight at a time take 2 s, one after the other 16 s"


def reward_processes() -> list[psutil.Process]:
    """The template first, then what was forked from it."""
    children = psutil.Process().children(recursive=True)
    alive = [child for child in children if child.status() != psutil.STATUS_ZOMBIE]
    return [process for process in alive if process.cmdline()[:1] == ["rewards"]]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("first", [0, 1], ids=["template and scorers", "scorers"])
def test_processes_killed_or_stopped_while_idle_are_replaced_at_the_cost_of_a_time_limit(
    number, first, monkeypatch
):
    monkeypatch.setattr(reward_pool, "_MAX_FORK_S", 1.0)

    async def ask() -> list:
        pool = RewardPool("addition", EVALUATED, 1.0, 2)
        await asyncio.gather(*(pool.score("", "0.5") for _ in range(8)))
        for process in reward_processes()[first:]:
            process.send_signal(number)
        scores = (pool.score("", "0.25") for _ in range(20))
        found = await asyncio.gather(*scores, return_exceptions=True)
        hanging = (pool.score("", "time.sleep(3600)") for _ in range(2))
        await asyncio.gather(*hanging, return_exceptions=True)  # needs new ones
        assert await pool.score("", "0.75") == (0.75, {})
        pool.close()
        return found

    began = time.monotonic()
    failed = [outcome for outcome in asyncio.run(ask()) if outcome != (0.25, {})]
    assert len(failed) <= (2 if number == signal.SIGSTOP else 0), "a stopped one may cost its own"
    assert all("timed out" in str(error) for error in failed)
    assert time.monotonic() - began < 14, "the limits of two rewards and of a fork"


def test_a_cancelled_caller_cancels_no_other_and_a_closed_pool_leaves_no_process():
    async def ask() -> list[int]:
        pool = RewardPool("addition", EVALUATED, 60.0, 2)
        callers = [asyncio.create_task(pool.score("", text)) for text in ("1.0", "2.0", "3.0")]
        await asyncio.sleep(0)
        callers[1].cancel()
        first, second, third = await asyncio.gather(*callers, return_exceptions=True)
        assert (first, third) == ((1.0, {}), (3.0, {}))
        assert isinstance(second, asyncio.CancelledError)
        hanging = asyncio.create_task(pool.score("", "time.sleep(3600)"))
        await asyncio.sleep(0.3)
        processes = reward_processes()
        pool.close()
        with pytest.raises(RuntimeError, match="closed"):
            await pool.score("", "1.0")
        hanging.cancel()
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
from asyncrl.engine.reward_pool import RewardPool, _Died, _Scorer

async def ask():
    pool = RewardPool("addition", [{EVALUATED[0]!r}], 60.0)
    for name in ("turtledemo", "torch", "asyncrl.engine.score"):
        assert "turtledemo" in sys.modules
        assert await pool.score("", f"float({{name!r}} in sys.modules)") == (name[0] == "a", {{}})
    print(*(child.pid for child in psutil.Process().children(recursive=True)), flush=True)
    if sys.argv[1] == "raise":
        raise ValueError("no close")
    await pool.score("", "time.sleep(3600)")

asyncio.run(ask())
"""


@pytest.mark.parametrize("end", ["raise", "kill"])
def test_reward_processes_import_neither_main_nor_torch_and_end_with_their_owner(end):
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, end],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    pids = [int(pid) for pid in owner.stdout.readline().split()]
    assert len(pids) >= 2
    if end == "kill":
        owner.kill()
    assert owner.wait(10) == (-signal.SIGKILL if end == "kill" else 1)
    assert are_gone(pids)


def test_a_process_that_answers_out_of_order_is_ended_and_all_its_responses_are_scored_again():
    """Else it could answer later responses for ever, and never the first."""

    async def ask() -> list:
        near, far = socket.socketpair()
        process = subprocess.Popen(["sleep", "60"], start_new_session=True)
        streams = await asyncio.open_connection(sock=near)
        scorer = _Scorer(process.pid, *streams, limit_s=20.0, is_order_known=True)
        scores = [asyncio.create_task(scorer.score([1.0, "", text])) for text in ("a", "b")]
        await asyncio.sleep(0)
        far.sendall(b"[1, 7.0, {}]\n")
        outcomes = await asyncio.gather(*scores, return_exceptions=True)
        with pytest.raises(_Died):
            await scorer.score([1.0, "", "c"])
        assert process.wait(10) == -signal.SIGKILL
        far.close()
        return outcomes

    assert [type(outcome) for outcome in asyncio.run(ask())] == [_Died, _Died]
