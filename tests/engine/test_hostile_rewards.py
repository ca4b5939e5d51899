"""Reward processes against text and code that mean harm: what is contained, with namespaces or without."""

import asyncio
import contextlib
import json
import mmap
import multiprocessing
import os
import resource
import socket
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from setproctitle import setproctitle

from asyncrl.engine.reward_pool import RewardPool, _Scorer
from asyncrl.engine.reward_process import _LIMITS, MEMORY_BYTES, _run_scorer, _why_no_namespaces
from asyncrl.engine.score import MAX_FAILURE, Failed, load_score

needs_namespaces = pytest.mark.skipif(
    bool(_why_no_namespaces()), reason="the kernel gives no namespaces here"
)


def attack(response: str) -> float:
    """Does what the response says; 1 if it was done."""
    what, *arguments = response.split()
    return float(ATTACKS[what](*arguments) is not False) if what in ATTACKS else float(response)


def start_daemon(title: str) -> None:
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            setproctitle(title)
            time.sleep(600)
        os._exit(0)


def fork_without_end() -> None:
    while True:
        os.fork()


def write(path: str) -> None:
    with open(path, "w") as file:
        file.write("broken in")


def connect(port: str) -> None:
    socket.create_connection(("127.0.0.1", int(port)), timeout=1)


def spoil_replies(what: str) -> bool:
    """Write to every socket that there is."""
    replies = {
        "large": b"[0, 1e300, {}]\n",
        "surrogates": json.dumps([0, "\ud800" * 1000]).encode() + b"\n",
    }
    replies |= {
        "line": json.dumps([0, "\n" + "no line\n" * 5000]).encode() + b"\n",
        "bool": b"[0, true, {}]\n",
    }
    replies |= {
        "parts": b'[0, 1.0, {"mean": 1.0}]\n',
        "part": b'[0, 1.0, {"x": 1e999}]\n',
        "other": b"[7, 1.0, {}]\n",
    }
    replies |= {
        "nested": b"[" * 60_000 + b"\n",
        "nan": b"NaN\n",
        "long": b"1" * 200_000,
        "pickle": b"\x80\x04N.\n",
    }
    for descriptor in range(3, 64):
        with contextlib.suppress(OSError):
            os.write(descriptor, replies[what])
    return True


def count_limits() -> bool:
    kept = [resource.getrlimit(limit) == (most, most) for limit, most in _LIMITS.items()]
    status = Path("/proc/self/status").read_text()
    memory, cpu = (
        resource.getrlimit(resource.RLIMIT_AS)[1],
        resource.getrlimit(resource.RLIMIT_CPU)[0],
    )
    return (
        all(kept)
        and "NoNewPrivs:\t1" in status
        and MEMORY_BYTES < memory < MEMORY_BYTES + (64 << 30)
        and cpu < 100
    )


ATTACKS = {
    "daemon": start_daemon,
    "bomb": fork_without_end,
    "write": write,
    "unlink": os.unlink,
    "connect": connect,
    "kill": lambda pid: os.kill(int(pid), 9),
    "run": lambda *command: subprocess.run(command, check=True),
    "allocate": lambda: bytearray(20 << 30),
    "map": lambda: mmap.mmap(-1, 20 << 30),
    "hoard": lambda: [bytes(100 << 20) for _ in range(1000)],
    "spoil": spoil_replies,
    "limits": count_limits,
    "remount": lambda: subprocess.run(["mount", "-o", "remount,rw", "/"], check=True),
}


def titles() -> str:
    """What all processes of this machine are called by ps."""
    found = ""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess):
            found += " ".join(process.cmdline())
    return found


ATTACK = [f"{__file__}:attack"]


def outcomes(*responses: str, timeout_s=1.0) -> list:
    """What becomes of each response, one after the other, in one pool of one process."""

    async def ask() -> list:
        pool = RewardPool("addition", ATTACK, timeout_s, 1)
        try:
            found = [
                (await asyncio.gather(pool.score("", r), return_exceptions=True))[0]
                for r in responses
            ]
            return [outcome if isinstance(outcome, Exception) else outcome[0] for outcome in found]
        finally:
            pool.close()

    return asyncio.run(ask())


def test_every_limit_is_set():
    assert outcomes("limits") == [1.0]


@pytest.mark.parametrize("how", ["allocate", "map", "hoard"])
def test_memory_that_is_too_much_fails_its_own_response(how):
    failed, good = outcomes(how, "0.5", timeout_s=10.0)
    assert isinstance(failed, Failed) and good == 0.5
    assert "MemoryError" in str(failed) or "Cannot allocate memory" in str(failed)


def test_no_byte_is_written_to_a_file(tmp_path):
    path = tmp_path / "file"
    failed, good = outcomes(f"write {path}", "0.5")
    assert isinstance(failed, Failed) and good == 0.5
    assert not path.exists() or not path.read_bytes()


@pytest.mark.parametrize(
    "what", ["nested", "nan", "long", "pickle", "bool", "parts", "part", "other", "large"]
)
def test_a_process_that_talks_nonsense_is_replaced(what):
    spoiled, good = outcomes(f"spoil {what}", "0.5")
    assert "its process died" in str(spoiled) and good == 0.5


def test_a_reason_that_a_process_makes_up_is_one_line_and_short():
    spoiled, good = outcomes("spoil line", "0.5")
    assert isinstance(spoiled, Failed) and str(spoiled).startswith("no line no line")
    assert good == 0.5, "its second answer is nobody's"
    assert "\n" not in str(spoiled) and len(str(spoiled)) <= MAX_FAILURE


def test_a_reason_of_lone_surrogates_that_a_process_makes_up_is_short_text():
    spoiled, good = outcomes("spoil surrogates", "0.5")
    assert isinstance(spoiled, Failed) and str(spoiled).startswith(r"\ud800\ud800") and good == 0.5
    assert len(str(spoiled).encode()) <= MAX_FAILURE


@needs_namespaces
def test_a_file_can_be_neither_emptied_nor_deleted(tmp_path):
    path = tmp_path / "file"
    path.write_text("precious")
    emptied, deleted, *_ = outcomes(
        f"write {path}", f"unlink {path}", "remount", f"run rm {path}", f"write {path}"
    )
    assert "Read-only file system" in str(emptied) and "Read-only file system" in str(deleted)
    assert path.read_text() == "precious"


@needs_namespaces
def test_there_is_no_network():
    with socket.create_server(("127.0.0.1", 0)) as server:
        (failed,) = outcomes(f"connect {server.getsockname()[1]}")
    assert "Network is unreachable" in str(failed)


@needs_namespaces
def test_other_processes_cannot_be_killed():
    (failed,) = outcomes(f"kill {os.getpid()}")
    assert "No such process" in str(failed)


@needs_namespaces
def test_a_daemon_ends_with_its_response(tmp_path):
    title = f"hostile-{tmp_path.name}"
    first, good = outcomes(f"daemon {title}", "0.5")
    assert good == 0.5 and (first == 1.0 or "Resource temporarily unavailable" in str(first))
    assert title not in titles()


@needs_namespaces
def test_a_burst_of_forks_ends_within_its_time():
    """As root nothing but the time bounds it, so it is short."""
    before = len(psutil.pids())
    (failed,) = outcomes("bomb", timeout_s=0.1)
    assert isinstance(failed, Failed)
    deadline = time.monotonic() + 20
    while len(psutil.pids()) > before + 50:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def run_scorer_as(user: int, connection: socket.socket, in_namespaces: bool) -> None:
    with contextlib.suppress(PermissionError):  # it is no root that runs this
        os.setuid(user)
    _run_scorer(connection.detach(), load_score("addition", ATTACK), in_namespaces)


@pytest.mark.parametrize("in_namespaces", [False, pytest.param(True, marks=needs_namespaces)])
@pytest.mark.parametrize("user", [os.getuid(), 65534])
def test_limits_hold_for_root_and_for_others_with_namespaces_or_without(
    tmp_path, user, in_namespaces
):
    """One scorer, in a process of its own; only root cannot be kept from starting processes without namespaces."""
    ours, theirs = socket.socketpair()
    process = multiprocessing.get_context("spawn").Process(
        target=run_scorer_as, args=(user, theirs, in_namespaces)
    )
    with theirs:
        process.start()
    path, title = tmp_path / "file", f"hostile-{tmp_path.name}"
    tmp_path.chmod(0o777)
    texts = (
        ("limits", f"write {path}", "allocate")
        if user == 0
        else ("limits", f"daemon {title}", "allocate")
    )

    async def ask() -> list:
        streams = await asyncio.open_connection(sock=ours)
        scorer = _Scorer(process.pid, *streams, limit_s=20.0, is_order_known=True)
        asked = [scorer.score([20.0, "", text]) for text in texts]
        outcomes = await asyncio.gather(*asked, return_exceptions=True)
        scorer.kill()
        return outcomes

    (limits, _), kept, memory = asyncio.run(ask())
    process.join()
    kept, memory = str(kept), str(memory)
    assert limits == 1.0 and ": MemoryError" in memory
    assert (
        ("File too large" in kept or "Read-only" in kept)
        if user == 0
        else "temporarily unavailable" in kept
    )
    assert title not in titles() and (not path.exists() or not path.read_bytes())


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
    async def ask(pool: RewardPool) -> tuple[list, list, float]:
        assert await pool.score("8", "\\boxed{8}") == (1.0, {})  # it has imported all
        begun = time.monotonic()
        hostile = asyncio.gather(
            *(
                pool.score("8", text.replace("PATH", str(tmp_path / "broken-in")))
                for text in TEXTS.values()
            ),
            return_exceptions=True,
        )
        good = await asyncio.gather(*(pool.score("8", f"\\boxed{{{i}}}") for i in range(6, 10)))
        return await hostile, good, time.monotonic() - begun

    with contextlib.closing(RewardPool("gsm8k", [], 4.0, 4)) as pool:
        found, good, taken_s = asyncio.run(ask(pool))
    named = dict(zip(TEXTS, found, strict=True))
    assert good == [(right, {}) for right in (0.0, 0.0, 1.0, 0.0)]
    assert all(outcome == (0.0, {}) or isinstance(outcome, Failed) for outcome in found), named
    assert isinstance(named["tower"], Failed) or isinstance(named["boxed tower"], Failed), named
    assert not list(tmp_path.iterdir()), "text became code"
    assert taken_s < 60, json.dumps({name: str(outcome)[:80] for name, outcome in named.items()})
