"""The stacks of all processes, with real ones."""

import os
import signal
import subprocess

import psutil
from programs import run_python, start_python, wait_until

from asyncrl.cluster.stacks import title

ROOT_OF_TWO = (
    "import multiprocessing, os, subprocess, sys, time\n"
    "from asyncrl.cluster.processes import exit_with_parent\n"
    "from asyncrl.cluster.stacks import write_stacks_to\n"
    "def child():\n"
    "    exit_with_parent(); write_stacks_to()\n"
    "    print(os.getpid(), flush=True); time.sleep(60)\n"
    "if __name__ == '__main__':\n"
    "    print(subprocess.Popen(['sleep', '60']).pid, flush=True)\n"
    "    write_stacks_to(sys.argv[1])\n"
    "    multiprocessing.get_context('fork').Process(target=child).start(); time.sleep(60)\n"
)


def test_the_stacks_of_all_processes_that_have_some_go_to_one_file_and_a_stopped_one_is_named_there(
    tmp_path,
):
    path = tmp_path / "stacks.txt"
    root = start_python("-c", ROOT_OF_TWO, path)
    deaf, child = (int(root.stdout.readline()) for _ in range(2))
    module = "from asyncrl.cluster.stacks import dump_stacks"
    dump = f"import os; os.environ['ASYNC_RL_STACKS'] = {str(path)!r}\n{module}\n"
    said = start_python("-c", dump + f"print(dump_stacks({root.pid}))").communicate(timeout=30)[0]
    assert said == f"stacks of all processes are in {path}\n"
    text = path.read_text()
    first, second = (text.index(f"(pid {pid}), sleeping") for pid in (root.pid, child))
    assert text.count("most recent call first", first, second) >= 1
    assert text.count("most recent call first", second) >= 2, (
        "the thread that waits for the parent's end as well"
    )
    os.kill(child, signal.SIGSTOP)
    wait_until(lambda: psutil.Process(child).status() == psutil.STATUS_STOPPED)
    start_python("-c", dump + f"dump_stacks({root.pid})").wait()
    assert f"(pid {child}), stopped" in path.read_text()
    assert psutil.Process(deaf).status() == psutil.STATUS_SLEEPING, "the signal would end it"
    for pid in (child, deaf):
        os.kill(pid, signal.SIGKILL)
    root.kill()


def test_where_stacks_cannot_be_written_the_reason_to_end_is_not_replaced(tmp_path):
    for path in (tmp_path / "gone" / "stacks.txt", "/dev/full"):
        code = "from asyncrl.cluster.stacks import dump_stacks; dump_stacks()"
        assert not run_python("-c", code, ASYNC_RL_STACKS=str(path)).stderr


def test_the_title_of_a_process_is_one_line_though_an_argument_has_several():
    with subprocess.Popen(["bash", "-c", "read\n:"], stdin=subprocess.PIPE) as process:
        assert title(psutil.Process(process.pid)) == f"bash -c read : (pid {process.pid})"
