"""Reward processes against text and code that mean harm: what is contained, with namespaces or without."""

import asyncio
import contextlib
import json
import multiprocessing
import os
import re
import signal
import socket
import time

import psutil
import pytest
from programs import wait_until
from reward_outcomes import outcomes, texts

from asyncrl.engine.reward_pool import RewardPool, _Scorer
from asyncrl.engine.reward_process import _run_scorer
from asyncrl.engine.score import MAX_FAILURE, Failed, load_score
from extras.containment import why_no_namespaces

needs_namespaces = pytest.mark.skipif(
    bool(why_no_namespaces()), reason="the kernel gives no namespaces here"
)
EVALUATED = texts("evaluated")
MEMORY = "MemoryError|Cannot allocate memory"
DEATH = "its process died"
REPLIES = {
    b"[0, 1e300, {}]\n": DEATH,
    b"[0, true, {}]\n": DEATH,
    b'[0, 1.0, {"mean": 1.0}]\n': DEATH,
    b'[0, 1.0, {"x": 1e999}]\n': DEATH,
    b"[7, 1.0, {}]\n": DEATH,
    b"[" * 60_000 + b"\n": DEATH,
    b"NaN\n": DEATH,
    b"1" * 200_000: DEATH,
    b"\x80\x04N.\n": DEATH,
    json.dumps([0, "\n" + "no line\n" * 5000]).encode() + b"\n": "^no line no line",
    json.dumps([0, "\ud800" * 1000]).encode() + b"\n": r"^\\ud800\\ud800",
}
"""What a process may send that it must not, and what comes of it."""


def titles() -> str:
    """What all processes of this host are called by ps."""
    texts_of_processes = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess):
            texts_of_processes += process.cmdline()
    return " ".join(texts_of_processes)


def assert_each_fails_alone(attacks: dict[str, str]) -> None:
    """Each response fails for its reason, in a new process, and the next one is scored."""
    responses = [text for attack in attacks for text in ("os._exit(0)", attack, "0.5")]
    found = outcomes(EVALUATED, *responses, timeout_s=10.0, num_processes=1, at_once=False)
    assert found[2::3] == [(0.5, {})] * len(attacks)
    for attack, error in zip(attacks, found[1::3], strict=True):
        assert isinstance(error, Failed), attack
        assert re.search(attacks[attack], str(error)), error
        assert "\n" not in str(error) and len(str(error).encode()) <= MAX_FAILURE


def test_memory_files_and_replies_are_limited(tmp_path):
    path = tmp_path / "file"
    attacks = {f"spoil_replies({reply!r})": reason for reply, reason in REPLIES.items()}
    attacks |= {
        "bytearray(20 << 30)": MEMORY,
        "mmap.mmap(-1, 20 << 30)": MEMORY,
        "[bytes(100 << 20) for _ in range(1000)]": MEMORY,
        f"Path('{path}').write_text('broken in')": "File too large|Read-only",
    }
    assert_each_fails_alone(attacks)
    assert not path.exists() or not path.read_bytes()
    assert outcomes(EVALUATED, "has_limits()") == [(1.0, {})]


@needs_namespaces
def test_files_network_and_other_processes_are_out_of_reach(tmp_path):
    path = tmp_path / "file"
    path.write_text("precious")
    command = f"mount -o remount,rw /; rm '{path}'"
    refused = "must be superuser.+cannot remove.+Read-only file system"
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        connect = f"socket.create_connection(('127.0.0.1', {port}))"
        attacks = {
            f"Path('{path}').write_text('')": "Read-only file system",
            f"Path('{path}').unlink()": "Read-only file system",
            f"throw(OSError(subprocess.run({command!r}, shell=True, capture_output=True)))": refused,
            connect: "Network is unreachable",
            f"os.kill({os.getpid()}, 9)": "No such process",
        }
        assert_each_fails_alone(attacks)
        assert outcomes(texts("evaluated_async"), f"connect('localhost', {port})") == [(1.0, {})]
        (error,) = outcomes(texts("evaluated", "judge"), connect)
        assert "Network is unreachable" in str(error), "beside an async function, too"
    assert path.read_text() == "precious"


@needs_namespaces
def test_a_daemon_ends_with_its_response(tmp_path):
    title = f"hostile-{tmp_path.name}"

    async def ask():
        pool = RewardPool("addition", EVALUATED, 5.0, 1)
        responses = (f"start_daemon('{title}')", "0.5")
        found = [await asyncio.gather(pool.score("", r), return_exceptions=True) for r in responses]
        texts_of_processes = titles()
        pool.close()
        return found, texts_of_processes

    ([started], [scored]), texts_of_processes = asyncio.run(ask())
    assert scored == (0.5, {}) and title not in texts_of_processes
    assert started == (1.0, {}) or "Resource temporarily unavailable" in str(started)


@needs_namespaces
def test_a_burst_of_forks_ends_within_its_time(tmp_path):
    """As root nothing but the time bounds it, so it is short."""
    title = f"hostile-{tmp_path.name}"
    (error,) = outcomes(EVALUATED, f"fork_without_end('{title}')", timeout_s=0.1)
    assert isinstance(error, Failed)
    wait_until(lambda: title not in titles())


def run_scorer(connection: socket.socket, in_namespaces: bool) -> None:
    score = load_score("addition", EVALUATED)
    with contextlib.suppress(PermissionError):  # it is no root that runs this
        os.setuid(65534)
    _run_scorer(connection.detach(), score, in_namespaces)


@pytest.mark.parametrize("in_namespaces", [False, pytest.param(True, marks=needs_namespaces)])
def test_limits_hold_for_others_than_root_with_namespaces_or_without(tmp_path, in_namespaces):
    """One scorer, in a process of its own. The tests above have those of root, where it runs them."""
    ours, theirs = socket.socketpair()
    process = multiprocessing.get_context("spawn").Process(
        target=run_scorer, args=(theirs, in_namespaces)
    )
    with theirs:
        process.start()
    title = f"hostile-{tmp_path.name}"

    async def ask() -> list:
        streams = await asyncio.open_connection(sock=ours)
        scorer = _Scorer(process.pid, *streams, limit_s=20.0, is_order_known=True)
        responses = ("has_limits()", f"start_daemon('{title}')", "bytearray(20 << 30)")
        scores = [scorer.score([20.0, "", text]) for text in responses]
        found = await asyncio.gather(*scores, return_exceptions=True)
        scorer.kill()
        return found

    limits, harmed, memory = asyncio.run(ask())
    process.join()
    assert limits == (1.0, {}) and ": MemoryError" in str(memory)
    assert "temporarily unavailable" in str(harmed) and title not in titles()


def fork_scorer(connection: socket.socket, in_namespaces: bool) -> None:
    score = load_score("addition", EVALUATED)
    if os.fork() == 0:
        _run_scorer(connection.detach(), score, in_namespaces)
    signal.pause()


@pytest.mark.parametrize("in_namespaces", [False, pytest.param(True, marks=needs_namespaces)])
def test_a_scorer_dies_with_the_template_that_forked_it(in_namespaces):
    """Also when whoever asks still has its socket open."""
    ours, theirs = socket.socketpair()
    template = multiprocessing.get_context("spawn").Process(
        target=fork_scorer, args=(theirs, in_namespaces)
    )
    with theirs:
        template.start()
    with ours:
        ours.settimeout(60)
        ours.sendall(b'[0, 60.0, "", "0.5"]\n')
        assert json.loads(ours.recv(1000)) == [0, 0.5, {}]
        template.kill()
        assert ours.recv(1) == b"", "nobody has the other end open"


TEXTS = {
    "tower": "9**9**9**9",
    "boxed tower": "\\boxed{9^{9^{9^9}}}",
    "digits": "\\boxed{" + "7" * 10**6 + "}",
    "polynomial": "\\boxed{(x+y+z+w)^{400}}",
    "zeros": "\\boxed{10^{1000000000}}",
    "numbers": "1 " * 200_000,
    "nested": "\\frac{" * 5000,
    "import": "\\boxed{__import__('os').system('touch PATH')}",
    "eval": "eval(\"__import__('os').system('touch PATH')\")",
    "lambda": "\\boxed{(lambda: open('PATH', 'w'))()}",
    "surrogate": "\\boxed{\ud800}",
    "nul": "\\boxed{\0}",
}


def test_hostile_text_costs_at_most_its_own_reward_and_time(tmp_path):
    responses = [text.replace("PATH", str(tmp_path / "broken-in")) for text in TEXTS.values()]

    async def ask(pool: RewardPool) -> tuple[list, list, float]:
        assert await pool.score("8", "\\boxed{8}") == (1.0, {})  # it has imported all
        began = time.monotonic()
        hostile = [asyncio.create_task(pool.score("8", response)) for response in responses]
        good = await asyncio.gather(*(pool.score("8", f"\\boxed{{{i}}}") for i in range(6, 10)))
        found = await asyncio.gather(*hostile, return_exceptions=True)
        return found, good, time.monotonic() - began

    with contextlib.closing(RewardPool("gsm8k", [], 3.0, 4)) as pool:
        found, good, taken_s = asyncio.run(ask(pool))
    named = dict(zip(TEXTS, found, strict=True))
    assert good == [(right, {}) for right in (0.0, 0.0, 1.0, 0.0)]
    assert all(outcome == (0.0, {}) or isinstance(outcome, Failed) for outcome in found), named
    assert isinstance(named["tower"], Failed) or isinstance(named["boxed tower"], Failed), named
    assert not list(tmp_path.iterdir()), "text became code"
    assert taken_s < 60, named
