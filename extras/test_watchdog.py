"""Processes that are stopped: with real ones, and short limits."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]


def start(code, *arguments, **options):
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, **options)


ROOT_OF_TWO = (
    "import multiprocessing, os, sys, time\n"
    "from asyncrl.cluster.processes import exit_with_parent\n"
    "from extras.watchdog import end_what_is_stopped\n"
    "def child():\n"
    "    exit_with_parent()\n"
    "    print(os.getpid(), flush=True); time.sleep(60)\n"
    "if __name__ == '__main__':\n"
    "    end_what_is_stopped(float(sys.argv[1]))\n"
    "    context = multiprocessing.get_context('fork')\n"
    "    process = context.Process(target=child); process.start()\n"
    "    process.join(); print('child ended', process.exitcode, flush=True); time.sleep(60)\n"
)


def start_two(limit_s=0.5):
    """A process that has what is stopped ended, and the pid of its child."""
    root = start(ROOT_OF_TWO, str(limit_s), stderr=subprocess.STDOUT)
    return root, int(root.stdout.readline())


def test_a_process_that_is_stopped_for_too_long_is_killed_and_named():
    root, child = start_two()
    os.kill(child, signal.SIGSTOP)
    said = [root.stdout.readline() for _ in range(2)]
    root.kill()
    assert f"(pid {child}) was stopped (SIGSTOP) for 0.5 s, and is killed" in said[0]
    assert said[1] == "child ended -9\n"


def test_the_only_process_of_a_run_is_killed_and_named_too():
    root, child = start_two()
    root.send_signal(signal.SIGSTOP)
    assert root.wait(20) == -signal.SIGKILL
    os.kill(child, signal.SIGKILL)
    (said,) = root.stdout.read().splitlines()
    assert f"(pid {root.pid}) was stopped (SIGSTOP) for 0.5 s, and is killed" in said


RANK = (
    "import os, sys\n"
    "from extras.watchdog import end_what_is_stopped\n"
    "end = end_what_is_stopped(0.5)\n"
    "print(os.getpid(), flush=True); sys.stdin.readline(); end()\n"
)
AGENT = (
    "import os, subprocess, sys\n"
    f"command = [sys.executable, '-c', {RANK!r}]\n"
    "subprocess.run(command, env={**os.environ, 'TORCHELASTIC_RUN_ID': 'x'})\n"
)


def start_agent_and_rank():
    agent = start(AGENT, stdin=subprocess.PIPE, stderr=subprocess.STDOUT)
    return agent, psutil.Process(int(agent.stdout.readline()))


def test_an_agent_that_is_stopped_while_its_ranks_finish_is_killed_and_named():
    agent, _ = start_agent_and_rank()
    agent.send_signal(signal.SIGSTOP)
    said = agent.communicate("finish\n", timeout=20)[0]  # until the one that watches has ended, too
    assert agent.returncode == -signal.SIGKILL
    assert f"(pid {agent.pid}) was stopped (SIGSTOP) for 0.5 s, and is killed" in said


def test_who_watches_for_a_rank_whose_agent_was_killed_before_watches_nobody_else():
    code = RANK.replace(
        "end = ", "import time\nwhile os.getppid() == int(sys.argv[1]): time.sleep(0.01)\nend = "
    )
    orphan = f"import os, subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {code!r}, str(os.getpid())])"
    agent = start(orphan, stdin=subprocess.PIPE, env={**os.environ, "TORCHELASTIC_RUN_ID": "x"})
    rank = psutil.Process(int(agent.stdout.readline()))
    assert agent.wait() == 0 and rank.ppid() != agent.pid and len(rank.children()) == 1
    assert agent.communicate("finish\n", timeout=20)[0] == "", (
        "it ends with the rank and with who watches for it"
    )


def test_who_watches_ends_with_the_agent_of_ranks_that_have_finished():
    agent, rank = start_agent_and_rank()
    (watch,) = rank.children()
    assert agent.communicate("finish\n", timeout=20)[0] == ""
    assert agent.returncode == 0 and psutil.wait_procs([watch], timeout=5)[0]


def test_a_run_ends_though_the_process_that_watches_is_itself_stopped():
    rank = start(RANK, stdin=subprocess.PIPE, stderr=subprocess.STDOUT)
    rank.stdout.readline()
    (watch,) = psutil.Process(rank.pid).children()
    watch.suspend()
    assert rank.communicate("finish\n", timeout=20)[0] == "" and not watch.is_running()


def test_a_process_that_is_stopped_for_a_moment_goes_on():
    root, child = start_two(limit_s=2)
    for _ in range(4):  # longer than the limit, all together
        os.kill(child, signal.SIGSTOP)
        time.sleep(0.6)
        os.kill(child, signal.SIGCONT)
        time.sleep(0.3)  # a look at it, which comes every 0.2 s
    assert root.poll() is None and psutil.pid_exists(child)
    root.kill()
