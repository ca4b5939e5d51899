"""Rewards that raise, hang, die, lie and mean harm, in real processes: what each costs, and what it cannot reach."""

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import sys

import psutil
import pytest
import user_rewards
from programs import wait_until
from user_rewards import FILE, texts

from asyncrl.engine import reward_pool
from asyncrl.engine.containment import namespace_error
from asyncrl.engine.reward_pool import MAX_TOGETHER, RewardPool
from asyncrl.engine.rewards import MAX_FAILURE, Failed

needs_namespaces = pytest.mark.skipif(
    bool(namespace_error()), reason="the kernel gives no namespaces here"
)
EVALUATED = texts("evaluated")
DEATH, HANG = "its process died", "timed out after 1 s"
MEMORY = "MemoryError|Cannot allocate memory"
BAD = {
    "float('nan')": "the reward is nan, not a finite number or a dict of them",
    "{}": "the reward is {}, not a finite number",
    "{'right': 1.0, 'wrong': float('inf')}": "the part 'wrong' is inf, not a finite number",
    "{3: 1.0}": "1 parts, [3]; allowed are 64 printable names",
    "{'x' * 1000: 1.0}": "printable names of at most 128 characters",
    "{'mean': 1.0}": "none of them mean, std, zero_variance_groups, overlong_penalty",
    "{str(i): 1.0 for i in range(1000)}": "1000 parts",
    "-1e13": "the reward is -1e+13, allowed is -1e+12 to 1e+12; scale it down",
    "10**400": "OverflowError: int too large to convert to float",
    r"{}['no\nsuch key']": r", line LINE: KeyError: 'no\nsuch key'",
    r"throw(ValueError('\ud800' * 1000))": r"ValueError: \ud800\ud800",
    "throw(Unspeakable)": "Unspeakable: <exception str() failed>",
    "throw(asyncio.CancelledError)": "CancelledError",
    "sys.exit(3)": "SystemExit: 3",
    "os._exit(0)": DEATH,
    "ctypes.string_at(0)": DEATH,
    "time.sleep(3600)": HANG,
    "bytearray(20 << 30)": MEMORY,
    "[bytes(100 << 20) for _ in range(1000)]": MEMORY,
    "Path('PATH').write_text('broken in')": "File too large|Read-only file system",
}
"""Responses, and the reason that each fails for, or those that it may fail for."""
REPLIES = {
    b"[1, 1e300, {}]\n": DEATH,
    b'[1, 1.0, {"mean": 1.0}]\n': DEATH,
    b'[1, 1.0, {"x": 1e999}]\n': DEATH,
    b'[1, 1.0, {"x": "y"}]\n': DEATH,
    b"[777, 1.0, {}]\n": DEATH,
    b"[" * 60_000 + b"\n": DEATH,
    b"1" * 200_000: DEATH,
    json.dumps([1, "\n" + "no line\n" * 5000]).encode() + b"\n": "no line no line",
    json.dumps([1, "\ud800" * 1000]).encode() + b"\n": r"\ud800\ud800",
}
"""What a process may send that it must not, and what comes of it."""
BAD |= {f"spoil_replies({reply!r})": reason for reply, reason in REPLIES.items()}
BAD_ASYNC = {"asyncio.sleep(3600)": HANG, "ignore_cancellation()": HANG}
BAD_ASYNC |= {
    text: BAD[text] for text in ("os._exit(0)", "time.sleep(3600)", r"{}['no\nsuch key']")
}
GOOD = {
    "-1e12": -1e12,
    "has_limits()": 1.0,
    "float('torch' in sys.modules)": 0.0,
    "float('pytest' in sys.modules)": 0.0,
}


async def scores_of(pool: RewardPool, *responses: str, answer: str = "") -> list:
    """Ask for all at once. Return reward and parts of each response, or the error."""
    scores = (pool.score(answer, response) for response in responses)
    return await asyncio.gather(*scores, return_exceptions=True)


@pytest.fixture(scope="module")
def outcomes():
    """A function that asks for scores of responses. Each list of functions has one pool."""
    pools = {}

    def ask(names: str, *responses: str) -> list:
        if names not in pools:
            pools[names] = RewardPool("addition", texts(*names.split()), 1.0)
        return runner.run(scores_of(pools[names], *responses))

    with asyncio.Runner() as runner:
        yield ask
        for pool in pools.values():
            pool.close()


@pytest.mark.parametrize(("name", "bad"), [("evaluated", BAD), ("evaluated_async", BAD_ASYNC)])
def test_each_response_has_its_own_outcome_whatever_the_others_do(outcomes, name, bad, tmp_path):
    path, line = tmp_path / "file", getattr(user_rewards, name).__code__.co_firstlineno + 2
    good = {f"{number / 4}": number / 4 for number in range(8 * len(bad))}
    if name == "evaluated":
        good |= GOOD
    else:
        line += 1
    responses = [*good, *bad]
    random.Random(0).shuffle(responses)
    asked = [response.replace("PATH", str(path)) for response in responses]
    found = dict(zip(responses, outcomes(name, *asked), strict=True))
    assert {response: found[response] for response in good} == {
        response: (reward, {}) for response, reward in good.items()
    }
    for response, reasons in bad.items():
        text = str(found[response])
        assert isinstance(found[response], Failed), response
        assert text.startswith(f"{FILE}:{name}") or response.startswith("spoil_replies"), text
        assert any(reason in text for reason in reasons.replace("LINE", str(line)).split("|")), text
        assert "\n" not in text and len(text.encode()) <= MAX_FAILURE
    assert not path.exists() or not path.read_bytes()


def test_responses_of_async_functions_wait_together():
    """A server answers none of them before all have asked."""
    all_have_asked = asyncio.Barrier(MAX_TOGETHER)

    async def answer(_, writer) -> None:
        await all_have_asked.wait()
        writer.close()

    async def ask() -> list:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            with contextlib.closing(
                RewardPool("addition", texts("evaluated_async"), 60.0, 1)
            ) as pool:
                return await scores_of(pool, *[f"ask('127.0.0.1', {port})"] * MAX_TOGETHER)

    assert asyncio.run(ask()) == [(1.0, {})] * MAX_TOGETHER


def processes_called(title: str) -> list[psutil.Process]:
    """All processes of this host of that title, the oldest first, as pids are given out again."""
    alive = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.cmdline()[:1] == [title] and process.status() != psutil.STATUS_ZOMBIE:
                alive.append(process)
    return sorted(alive, key=psutil.Process.create_time)


def test_processes_killed_or_stopped_while_idle_are_replaced_at_the_cost_of_a_time_limit(
    monkeypatch,
):
    monkeypatch.setattr(reward_pool, "MAX_FORK_S", 1.0)

    async def ask() -> list:
        pool = RewardPool("addition", EVALUATED, 1.0, 2, "idle")
        for number, most in ((signal.SIGKILL, 0), (signal.SIGSTOP, 2)):
            assert await scores_of(pool, *["0.5"] * 8) == [(0.5, {})] * 8
            for process in processes_called("idle"):
                process.send_signal(number)
            found = await scores_of(pool, *["0.25"] * 20)
            failed = [outcome for outcome in found if outcome != (0.25, {})]
            assert len(failed) <= most, "each that is stopped may cost its own"
            assert all("timed out" in str(error) for error in failed)
        pool.close()

    asyncio.run(ask())


def test_a_cancelled_caller_cancels_no_other_and_a_closed_pool_leaves_no_process():
    async def ask() -> None:
        pool = RewardPool("addition", EVALUATED, 60.0, 1, "closed")
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
        assert len(processes_called("closed")) >= 2
        pool.close()
        with pytest.raises(RuntimeError, match="closed"):
            await pool.score("", "1.0")

    asyncio.run(ask())
    wait_until(lambda: not processes_called("closed"))


def test_a_caller_that_is_cancelled_while_its_process_is_forked_does_not_end_the_template():
    async def ask() -> None:
        pool = RewardPool("addition", EVALUATED, 60.0, 1, "forking")
        assert await pool.score("", "1.0") == (1.0, {})
        template, *scorers = processes_called("forking")
        template.suspend()
        for scorer in scorers:
            scorer.kill()
        caller = asyncio.create_task(pool.score("", "2.0"))
        await asyncio.sleep(0.3)
        caller.cancel()
        await asyncio.gather(caller, return_exceptions=True)
        await asyncio.sleep(0.2)  # its end of the socket is closed by then
        template.resume()
        assert await pool.score("", "3.0") == (3.0, {})
        assert processes_called("forking")[0].pid == template.pid
        pool.close()

    asyncio.run(ask())


@needs_namespaces
def test_files_network_and_other_processes_are_out_of_reach(outcomes, tmp_path):
    path = tmp_path / "file"
    path.write_text("precious")
    command = f"mount -o remount,rw /; rm '{path}'"
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        connect = f"socket.create_connection(('127.0.0.1', {port}))"
        attacks = {
            f"Path('{path}').unlink()": "Read-only file system",
            f"throw(OSError(subprocess.run({command!r}, shell=True, capture_output=True)))": "must be superuser",
            connect: "Network is unreachable",
            f"os.kill({os.getpid()}, 9)": "No such process",
        }
        for error, reason in zip(outcomes("evaluated", *attacks), attacks.values(), strict=True):
            assert isinstance(error, Failed) and reason in str(error)
        assert outcomes("evaluated_async", f"connect('localhost', {port})") == [(1.0, {})]
        (error,) = outcomes("evaluated*0.25 judge*3", connect)
        assert "Network is unreachable" in str(error), "beside an async function, too"
    assert path.read_text() == "precious"


def test_plain_and_async_functions_make_one_reward_and_one_that_fails_fails_the_response(outcomes):
    scored, failed = outcomes("evaluated*0.25 judge*3", "4.0", "float('nan')")
    assert scored == (7.0, {"evaluated": 4.0, "judge": 2.0, "judge.wise": 2.0})
    assert str(failed).startswith(f"{FILE}:evaluated: the reward is nan")


@needs_namespaces
def test_what_a_response_starts_ends_with_it(outcomes, tmp_path):
    title = f"hostile-{tmp_path.name}"
    (started,) = outcomes("evaluated", f"start_daemon('{title}')")
    assert outcomes("evaluated", *["0.5"] * 4) == [(0.5, {})] * 4
    assert not processes_called(title)
    assert started == (1.0, {}) or "Resource temporarily unavailable" in str(started)

    async def fork() -> None:
        """As root nothing but the time bounds a burst of forks, so it is short."""
        with (
            contextlib.closing(RewardPool("addition", EVALUATED, 0.1)) as pool,
            pytest.raises(Failed),
        ):
            await pool.score("", f"fork_without_end('{title}')")

    asyncio.run(fork())
    wait_until(lambda: not processes_called(title))


AS_OTHERS = """
import contextlib, json, os, sys
from asyncrl.engine import reward_process

def become_another(*_):
    with contextlib.suppress(PermissionError):  # it is no root that runs this
        os.setuid(65534)
    return {reason!r}

reward_process.namespace_error = become_another
reward_process.run_template(*json.loads(sys.argv[1]))
"""


@pytest.mark.parametrize("in_namespaces", [False, pytest.param(True, marks=needs_namespaces)])
def test_others_than_root_are_limited_too_and_scorers_end_with_the_process_that_forked_them(
    in_namespaces, tmp_path, monkeypatch
):
    program = AS_OTHERS.format(reason="" if in_namespaces else "none for this test")
    monkeypatch.setattr(reward_pool, "COMMAND", [sys.executable, "-P", "-c", program])
    name = f"others-{tmp_path.name}"
    write = "__import__('tempfile').TemporaryFile(buffering=0, dir='/dev/shm').write(b'x')"
    responses = ("has_limits()", "bytearray(20 << 30)", f"start_daemon('{name}')", write)

    async def ask() -> None:
        pool = RewardPool("addition", EVALUATED, 20.0, 1, name)
        limits, memory, harmed, written = await scores_of(pool, *responses)
        assert limits == (1.0, {}) and ": MemoryError" in str(memory)
        assert "temporarily unavailable" in str(harmed)
        assert ("Read-only" if in_namespaces else "File too large") in str(written)
        hanging = asyncio.create_task(pool.score("", "time.sleep(3600)"))
        await asyncio.sleep(0.3)
        forked_from, *scorers = processes_called(name)
        forked_from.kill()
        assert scorers and not psutil.wait_procs(scorers, timeout=10)[1]
        pool.close()
        hanging.cancel()

    asyncio.run(ask())


TEXTS = (
    "9**9**9**9",
    "\\boxed{" + "7" * 10**6 + "}",
    "1 " * 200_000,
    "\\frac{" * 5000,
    "\\boxed{__import__('os').system('touch PATH')}",
    "eval(\"__import__('os').system('touch PATH')\")",
    "\\boxed{(lambda: open('PATH', 'w'))()}",
    "\\boxed{\ud800}",
    "\\boxed{\0}",
)


def test_hostile_text_costs_at_most_its_own_reward_and_time(tmp_path):
    responses = [text.replace("PATH", str(tmp_path / "broken-in")) for text in TEXTS]
    good = [f"\\boxed{{{number}}}" for number in range(6, 10)]

    async def ask() -> list:
        with contextlib.closing(RewardPool("gsm8k", [], 5.0)) as pool:
            return await scores_of(pool, *responses, *good, answer="8")

    *found, six, seven, eight, nine = asyncio.run(ask())
    assert (six, seven, eight, nine) == ((0.0, {}), (0.0, {}), (1.0, {}), (0.0, {}))
    assert isinstance(found[0], Failed)
    assert all(outcome == (0.0, {}) or isinstance(outcome, Failed) for outcome in found), found
    assert not list(tmp_path.iterdir()), "text became code"
