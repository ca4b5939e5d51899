"""Processes that are stopped: with real ones, and short limits."""

import os
import signal
import subprocess
import time

import psutil
from programs import start_python

ROOT_OF_TWO = (
    "import multiprocessing, os, time\n"
    "from asyncrl.cluster.processes import exit_with_parent\n"
    "from asyncrl.cluster.watchdog import watch_for_stopped\n"
    "def child():\n"
    "    exit_with_parent()\n"
    "    print(os.getpid(), flush=True); time.sleep(60)\n"
    "if __name__ == '__main__':\n"
    "    watch_for_stopped(1)\n"
    "    context = multiprocessing.get_context('fork')\n"
    "    process = context.Process(target=child); process.start()\n"
    "    process.join(); print('child ended', process.exitcode, flush=True); time.sleep(60)\n"
)
RANK = (
    "import os, sys\n"
    "from asyncrl.cluster import watchdog\n"
    "end = watchdog.watch_for_stopped(0.5)\n"
    "print(os.getpid(), flush=True); sys.stdin.readline(); end()\n"
)


def start(*words, **options):
    """Start a program. Return it, and the process whose pid is the first line that it prints."""
    program = start_python("-c", *words, stderr=subprocess.STDOUT, **options)
    return program, psutil.Process(int(program.stdout.readline()))


def test_a_process_that_is_stopped_for_too_long_at_a_time_is_killed_and_named():
    """So is the only process of a run."""
    root, child = start(ROOT_OF_TWO)
    for _ in range(5):  # twice the limit, all together
        child.suspend()
        time.sleep(0.4)
        child.resume()
        time.sleep(0.2)  # a look at it, which comes every 0.1 s
    assert root.poll() is None and child.is_running()
    child.suspend()
    said = [root.stdout.readline() for _ in range(2)]
    assert f"(pid {child.pid}) was stopped (SIGSTOP) for 1 s, and is killed" in said[0]
    assert said[1] == "child ended -9\n"
    root.send_signal(signal.SIGSTOP)
    said = root.communicate(timeout=20)[0]
    assert root.returncode == -signal.SIGKILL
    assert f"(pid {root.pid}) was stopped (SIGSTOP) for 1 s, and is killed" in said


def test_who_watches_ends_with_its_rank_though_it_was_stopped():
    rank_program, rank = start(RANK)
    (watch,) = rank.children()
    watch.suspend()
    assert rank_program.communicate("finish\n", timeout=20)[0] == ""
    assert rank_program.returncode == 0 and psutil.wait_procs([watch], timeout=5)[0]


def test_an_agent_that_is_stopped_while_its_rank_runs_is_killed_and_named():
    command = "import os, subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
    agent, _ = start(command, RANK, env={**os.environ, "TORCHELASTIC_RUN_ID": "x"})
    agent.send_signal(signal.SIGSTOP)
    said = agent.stdout.readline()
    assert f"(pid {agent.pid}) was stopped (SIGSTOP) for 0.5 s, and is killed" in said
    assert agent.wait(timeout=20) == -signal.SIGKILL
    agent.communicate("finish\n", timeout=20)
