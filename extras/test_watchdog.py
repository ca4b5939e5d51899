"""Processes that are stopped, and the stacks of all: with real ones, and short limits."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from extras.watchdog import dump_stacks

ROOT = Path(__file__).parents[1]


def start(code, *arguments, **options):
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, **options)


def test_stacks_are_asked_only_of_processes_that_can_give_them():
    deaf = start("import time; print('up', flush=True); time.sleep(60)")
    handler = "faulthandler.register(signal.SIGUSR1, file=sys.stdout)"
    able = start(f"import faulthandler, signal, sys, time; {handler}; print('up', flush=True); time.sleep(60)")
    assert deaf.stdout.readline() == able.stdout.readline() == "up\n"
    for process in (deaf, able):
        dump_stacks(process.pid)
    assert "most recent call first" in able.stdout.readline()
    assert deaf.poll() is None
    for process in (deaf, able):
        os.kill(process.pid, signal.SIGKILL)
        process.wait()


ROOT_OF_TWO = (
    "import multiprocessing, os, sys, time\n"
    "from asyncrl.cluster.processes import exit_with_parent\n"
    "from extras.watchdog import end_what_is_stopped, write_stacks_to\n"
    "def child():\n"
    "    exit_with_parent(); write_stacks_to()\n"
    "    print(os.getpid(), flush=True); time.sleep(60)\n"
    "if __name__ == '__main__':\n"
    "    write_stacks_to(sys.argv[1]); end_what_is_stopped(float(sys.argv[2]))\n"
    "    context = multiprocessing.get_context('fork')\n"
    "    process = context.Process(target=child); process.start()\n"
    "    process.join(); print('child ended', process.exitcode, flush=True); time.sleep(60)\n"
)


def start_two(tmp_path, limit_s=0.5):
    """A process that has what is stopped ended, and the pid of its child."""
    root = start(ROOT_OF_TWO, str(tmp_path / "stacks.txt"), str(limit_s), stderr=subprocess.STDOUT)
    return root, int(root.stdout.readline())


def test_a_process_that_is_stopped_for_too_long_is_killed_and_named(tmp_path):
    root, child = start_two(tmp_path)
    os.kill(child, signal.SIGSTOP)
    said = [root.stdout.readline() for _ in range(2)]
    root.kill()
    assert f"(pid {child}) was stopped (SIGSTOP) for 0.5 s, and is killed" in said[0]
    assert said[1] == "child ended -9\n"


def test_the_only_process_of_a_run_is_killed_and_named_too(tmp_path):
    root, child = start_two(tmp_path)
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
    code = RANK.replace("end = ", "import time\nwhile os.getppid() == int(sys.argv[1]): time.sleep(0.01)\nend = ")
    orphan = f"import os, subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {code!r}, str(os.getpid())])"
    agent = start(orphan, stdin=subprocess.PIPE, env={**os.environ, "TORCHELASTIC_RUN_ID": "x"})
    rank = psutil.Process(int(agent.stdout.readline()))
    assert agent.wait() == 0 and rank.ppid() != agent.pid and len(rank.children()) == 1
    assert agent.communicate("finish\n", timeout=20)[0] == "", "it ends with the rank and with who watches for it"


def test_who_watches_ends_with_the_agent_of_ranks_that_have_finished():
    agent, rank = start_agent_and_rank()
    (watch,) = rank.children()
    assert agent.communicate("finish\n", timeout=20)[0] == ""
    assert agent.returncode == 0 and psutil.wait_procs([watch], timeout=5)[0]


def test_a_process_that_is_stopped_for_a_moment_goes_on(tmp_path):
    root, child = start_two(tmp_path)
    for _ in range(4):
        os.kill(child, signal.SIGSTOP)
        time.sleep(0.15)
        os.kill(child, signal.SIGCONT)
        time.sleep(0.25)
    assert root.poll() is None and psutil.pid_exists(child)
    root.kill()


def test_the_stacks_of_all_processes_go_to_one_file_and_a_stopped_one_is_named_there(tmp_path):
    root, child = start_two(tmp_path, limit_s=60)
    path, deadline = tmp_path / "stacks.txt", time.monotonic() + 10
    dump = f"import os; os.environ['ASYNC_RL_STACKS'] = {str(path)!r}\nfrom records.standstill import dump_stacks\n"
    said = start(dump + f"print(dump_stacks({root.pid}))").communicate(timeout=30)[0]
    assert said == f"stacks of all processes are in {path}\n"
    text = path.read_text()
    first, second = text.index(f"(pid {root.pid}), sleeping"), text.index(f"(pid {child}), sleeping")
    assert text.count("most recent call first", first, second) >= 2 <= text.count("most recent call first", second)
    os.kill(child, signal.SIGSTOP)
    while psutil.Process(child).status() != psutil.STATUS_STOPPED:
        assert time.monotonic() < deadline
    start(dump + f"dump_stacks({root.pid})").wait()
    assert f"(pid {child}), stopped" in path.read_text()
    os.kill(child, signal.SIGKILL)  # stopped, it would outlive all
    root.kill()
