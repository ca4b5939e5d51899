import os
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from pathlib import Path

import psutil
import pytest
from programs import ROOT, run_python, start_python, wait_until

from asyncrl.cluster.processes import (
    Interrupted,
    folder_of_sockets,
    kill_session,
    status_of,
    without_torchrun,
)


def test_torchruns_variables_are_taken_out_and_nothing_else():
    kept = {"HOME": "/h", "CUDA_VISIBLE_DEVICES": "1"}
    assert (
        without_torchrun(kept | {"RANK": "0", "MASTER_ADDR": "x", "TORCHELASTIC_RUN_ID": "y"})
        == kept
    )


def test_a_process_ends_with_its_parent_also_if_that_ends_while_it_still_imports():
    watch, say = "exit_with_parent(0.05)", "print(os.getpid(), flush=True)"
    for steps in (f"{watch}; {say}", f"{say}; time.sleep(1); {watch}"):
        child = f"import os, time; from asyncrl.cluster.processes import exit_with_parent\n{steps}; time.sleep(60)"
        parent = start_python(
            "-c",
            f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(60)",
        )
        pid = int(parent.stdout.readline())
        parent.kill()
        parent.wait()
        wait_until(lambda pid=pid: not psutil.pid_exists(pid))


def test_a_session_ends_with_the_parent_of_its_leader():
    """As an engine of several GPUs, the last process here watches nobody."""
    inner = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    worker = (
        "import os, subprocess, sys, time; os.setsid(); "
        "from asyncrl.cluster.processes import exit_with_parent; exit_with_parent(0.05); "
        f"subprocess.Popen([sys.executable, '-c', {inner!r}]); time.sleep(60)"
    )
    leader = start_python(
        "-c",
        f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {worker!r}]); time.sleep(60)",
    )
    pid = int(leader.stdout.readline())
    leader.kill()
    leader.wait()
    wait_until(lambda: not psutil.pid_exists(pid))


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (SystemExit(3), 3),
        (SystemExit("no rows"), 1),
        (SystemExit(0), 1),
        (KeyError("row"), 1),
        (ValueError("--steps"), 2),
        (Interrupted("stopped", 143), 143),
    ],
)
def test_a_run_that_an_error_ends_has_its_status_and_never_that_of_a_finished_one(error, status):
    assert status_of(error) == status


def test_a_signal_ends_a_run_at_once_while_it_reads_its_options():
    code = (
        "train_async.parse_config = lambda: signal.raise_signal(signal.SIGINT); train_async.main()"
    )
    run = run_python("-c", f"import signal, train_async; {code}")
    assert (run.returncode, run.stderr) == (-signal.SIGINT, "")


def test_a_signal_ends_a_run_also_where_code_of_others_catches_errors_or_has_caught_the_first_one():
    code = (
        "import signal; from asyncrl.cluster.processes import run_job\n"
        "def job():\n"
        "    for caught in (BaseException, Exception):\n"
        "        try: signal.raise_signal(signal.SIGINT)\n"
        "        except caught: pass\n"
        "run_job(job)"
    )
    run = run_python("-c", code)
    assert (run.returncode, run.stderr) == (130, "stopped by SIGINT\n")


def test_a_rank_of_several_says_why_it_ends_and_shows_where_if_the_code_is_at_fault():
    code = (
        "from asyncrl.cluster.processes import end_by\n"
        "try: {}['row']\n"
        "except KeyError as error: end_by(error, lambda: None)"
    )
    rank = start_python("-c", code, stderr=subprocess.PIPE)
    _, text = rank.communicate()
    assert text.startswith("error: KeyError('row')\nTraceback") and rank.returncode == 1


def test_a_session_is_killed_whole_when_its_leader_is_dead_also_if_nobody_has_missed_that_yet():
    code = (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); print(child.pid, flush=True)"
    )
    leader = start_python("-c", code, start_new_session=True)
    pid = int(leader.stdout.readline())
    wait_until(lambda: psutil.Process(leader.pid).status() == psutil.STATUS_ZOMBIE)
    begun = time.monotonic()
    kill_session(leader.pid, timeout_s=30)
    assert time.monotonic() - begun < 10
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    assert leader.wait() == 0


RANKS = """
import ctypes, os, signal, sys, time
from asyncrl.cluster import processes

def end(number, frame):
    has_lost = processes.has_lost_a_rank()
    time.sleep(3)  # longer than a rank that is stuck may take
    os.write(1, f"has lost a rank: {has_lost}\\n".encode())
    sys.exit(1)

signal.signal(signal.SIGTERM, end)
signal.signal(signal.SIGINT, signal.default_int_handler)
processes.STUCK_S = 1.0
processes.LEFT_S = 2.0
processes.end_if_stuck()
os.write(1, b"up\\n")
if sys.argv[1] == "fail":
    is_stuck = sys.argv[0] + ".stuck"
    if os.environ["RANK"] == "1":
        while not os.path.exists(is_stuck):
            time.sleep(0.01)
        processes.end_by(RuntimeError("rank 1 is out of memory"), lambda: None)
    open(is_stuck, "w").close()
if sys.argv[1] == "fail" or os.environ.get("IS_STUCK"):
    mutex = ctypes.create_string_buffer(256)
    for _ in range(2):  # in the kernel, as a thread that waits for a GPU is
        ctypes.CDLL(None).pthread_mutex_lock(mutex)
time.sleep(60)
"""


AGENT = """
import os, signal, subprocess, sys
number = int(sys.stdin.readline())
stuck = {"IS_STUCK": "1"} if number == signal.SIGINT else {}
command = [sys.executable, *sys.argv[1:]]
ranks = [subprocess.Popen(command, env=os.environ | changes) for changes in ({}, stuck)]
sys.stdin.readline()
for rank in ranks: rank.send_signal(number)
for rank in ranks: rank.wait()
"""
"""Does of torchrun what takes no time: it starts two ranks, and asks them to end."""


def test_a_rank_ends_also_where_no_handler_of_a_signal_runs_if_another_is_gone_and_else_in_its_time(
    tmp_path,
):
    """torchrun has not to kill anybody, and its report ends with the reason."""
    path = tmp_path / "ranks.py"
    path.write_text(RANKS)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    agent = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    words = (*agent, "--shutdown-timeout=600", path, "fail")
    failing = start_python(*words, env=environment, stderr=subprocess.PIPE)
    environment |= {"TORCHELASTIC_RUN_ID": "x", "LOCAL_WORLD_SIZE": "2"}
    started = [start_python("-c", AGENT, path, "wait", env=environment) for _ in range(2)]
    for stopped, number in zip(started, (signal.SIGTERM, signal.SIGINT), strict=True):
        stopped.stdin.write(f"{int(number)}\n")
        stopped.stdin.flush()
        assert [stopped.stdout.readline() for _ in range(2)] == ["up\n"] * 2
    stopped, interrupted = started
    assert stopped.communicate("end\n", timeout=60)[0] == "has lost a rank: False\n" * 2
    interrupted.communicate(
        "end\n", timeout=20
    )  # Ctrl-C: one rank ends, and the other one is stuck
    _, text = failing.communicate(timeout=60)
    assert failing.returncode == 1 and "forcefully" not in text
    assert text.splitlines().count("error: rank 1 is out of memory") == 1
    assert "error: rank 1 is out of memory" in text.splitlines()[-2]


def test_memory_that_is_freed_and_taken_again_costs_no_page_faults():
    faults = (
        "import resource; from asyncrl.cluster.processes import keep_freed_memory\n"
        "def faults():\n"
        "    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "    for _ in range(5): [bytearray(24 << 20) for _ in range(4)]\n"
        "    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before\n"
        "faults(); given_back = faults(); keep_freed_memory(); faults(); print(given_back, faults())"
    )
    given_back, kept = start_python("-c", faults).communicate(timeout=60)[0].split()
    assert int(kept) < 100 < int(given_back)


@pytest.mark.parametrize("length", [20, 50, 51, 150])
def test_engines_have_room_for_their_sockets_however_long_the_temporary_folder_is(
    length, monkeypatch
):
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="t") as short:
        folder = Path(short.ljust(length, "x"))
        folder.mkdir(exist_ok=True)
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        with folder_of_sockets() as path, socket.socket(socket.AF_UNIX) as server:
            server.bind(f"{path}/{uuid.uuid4()}")
            assert Path(path).parent == (folder if length <= 50 else Path("/tmp"))
        folder.rmdir()
