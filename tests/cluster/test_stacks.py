"""The stacks of all processes, with real ones."""

import os
import signal

import psutil
from programs import wait_until
from test_processes import start

from asyncrl.cluster.stacks import dump_stacks


def test_stacks_are_asked_only_of_processes_that_can_give_them():
    deaf = start("import time; print('up', flush=True); time.sleep(60)")
    handler = "faulthandler.register(signal.SIGUSR1, file=sys.stdout)"
    able = start(
        f"import faulthandler, signal, sys, time; {handler}; print('up', flush=True); time.sleep(60)"
    )
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
    "from asyncrl.cluster.stacks import write_stacks_to\n"
    "def child():\n"
    "    exit_with_parent(); write_stacks_to()\n"
    "    print(os.getpid(), flush=True); time.sleep(60)\n"
    "if __name__ == '__main__':\n"
    "    write_stacks_to(sys.argv[1])\n"
    "    multiprocessing.get_context('fork').Process(target=child).start(); time.sleep(60)\n"
)


def test_the_stacks_of_all_processes_go_to_one_file_and_a_stopped_one_is_named_there(tmp_path):
    path = tmp_path / "stacks.txt"
    root = start(ROOT_OF_TWO, str(path))
    child = int(root.stdout.readline())
    module = "from asyncrl.cluster.stacks import dump_stacks"
    dump = f"import os; os.environ['ASYNC_RL_STACKS'] = {str(path)!r}\n{module}\n"
    said = start(dump + f"print(dump_stacks({root.pid}))").communicate(timeout=30)[0]
    assert said == f"stacks of all processes are in {path}\n"
    text = path.read_text()
    first, second = (
        text.index(f"(pid {root.pid}), sleeping"),
        text.index(f"(pid {child}), sleeping"),
    )
    assert text.count("most recent call first", first, second) >= 1
    assert text.count("most recent call first", second) >= 2, (
        "the thread that waits for the parent's end as well"
    )
    os.kill(child, signal.SIGSTOP)
    wait_until(lambda: psutil.Process(child).status() == psutil.STATUS_STOPPED)
    start(dump + f"dump_stacks({root.pid})").wait()
    assert f"(pid {child}), stopped" in path.read_text()
    os.kill(child, signal.SIGKILL)  # stopped, it would outlive all
    root.kill()
