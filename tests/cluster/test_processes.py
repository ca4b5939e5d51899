import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from cluster.processes import dump_stacks, kill_session, without_torchrun

ROOT = Path(__file__).parents[2]


def start(code, *arguments, **options):
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, **options)


def test_torchruns_variables_are_taken_out_and_nothing_else():
    kept = {"HOME": "/h", "CUDA_VISIBLE_DEVICES": "1"}
    assert without_torchrun(kept | {"RANK": "0", "MASTER_ADDR": "x", "TORCHELASTIC_RUN_ID": "y"}) == kept


def test_a_process_ends_with_its_parent():
    child = (
        "import os, time; from cluster.processes import exit_with_parent\n"
        "exit_with_parent(0.05); print(os.getpid(), flush=True); time.sleep(60)"
    )
    parent = start(f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(60)")
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 10
    while psutil.pid_exists(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not psutil.pid_exists(pid)


def test_a_session_is_killed_whole_even_when_its_leader_is_dead():
    code = (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); print(child.pid, flush=True)"
    )
    leader = start(code, start_new_session=True)
    pid = int(leader.stdout.readline())
    leader.wait()
    assert psutil.pid_exists(pid)
    kill_session(leader.pid)
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_nobody_waits_for_a_process_that_has_ended_and_is_not_missed_yet():
    leader = start("import time; print('up', flush=True); time.sleep(60)", start_new_session=True)
    assert leader.stdout.readline() == "up\n"
    begun = time.monotonic()
    kill_session(leader.pid, timeout_s=30)
    assert time.monotonic() - begun < 10
    assert psutil.Process(leader.pid).status() == psutil.STATUS_ZOMBIE, "it is ours to wait for, and we did not"
    assert leader.wait() == -signal.SIGKILL


def test_what_is_alive_is_not_looked_at_for_garbage_and_what_comes_later_is():
    code = (
        "import gc, weakref; from cluster.processes import freeze_garbage\n"
        "class Ring:\n"
        "    def __init__(self): self.itself = self\n"
        "old, before = Ring(), len(gc.get_objects()); freeze_garbage()\n"
        "assert gc.get_freeze_count() > before / 2\n"
        "new = Ring(); gone, kept = weakref.ref(new), weakref.ref(old); del new, old; gc.collect()\n"
        "print(gone() is None, kept() is None)"
    )
    assert start(code).communicate(timeout=60)[0] == "True False\n"


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
    "from cluster.processes import end_what_is_stopped, exit_with_parent, write_stacks_to\n"
    "def child():\n"
    "    exit_with_parent(); end_what_is_stopped(0.5); write_stacks_to()\n"
    "    print(os.getpid(), flush=True); time.sleep(60)\n"
    "if __name__ == '__main__':\n"
    "    write_stacks_to(sys.argv[1]); end_what_is_stopped(0.5)\n"
    "    context = multiprocessing.get_context('fork')\n"
    "    process = context.Process(target=child); process.start()\n"
    "    process.join(); print('child ended', process.exitcode, flush=True); time.sleep(60)\n"
)


def start_two(tmp_path):
    """A process that ends what is stopped, its child that does so as well, and the pid of the child."""
    root = start(ROOT_OF_TWO, str(tmp_path / "stacks.txt"), stderr=subprocess.STDOUT)
    return root, int(root.stdout.readline())


def test_a_process_that_is_stopped_for_too_long_is_killed_and_named_by_its_parent(tmp_path):
    root, child = start_two(tmp_path)
    os.kill(child, signal.SIGSTOP)
    said = [root.stdout.readline() for _ in range(2)]
    root.kill()
    assert f"(pid {child}) was stopped (SIGSTOP) for 0.5 s, and is killed" in said[0]
    assert said[1] == "child ended -9\n"


def test_a_process_that_nobody_but_its_child_could_miss_is_killed_and_named_by_it(tmp_path):
    root, child = start_two(tmp_path)
    root.send_signal(signal.SIGSTOP)
    assert root.wait(20) == -signal.SIGKILL
    os.kill(child, signal.SIGKILL)
    assert f"(pid {root.pid}) was stopped (SIGSTOP) for 0.5 s, and is killed" in root.stdout.read()


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
    root, child = start_two(tmp_path)
    path, deadline = tmp_path / "stacks.txt", time.monotonic() + 10
    dump = f"import os; os.environ['ASYNC_RL_STACKS'] = {str(path)!r}\nfrom cluster.processes import dump_stacks\n"
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
    root.kill()


def test_a_rank_knows_whether_torchrun_ends_it_because_another_rank_is_gone(tmp_path):
    (tmp_path / "ranks.py").write_text(
        f"import os, signal, sys, time; sys.path.insert(0, {str(ROOT)!r})\n"
        "from cluster.processes import has_lost_a_rank\n"
        "def say(what): os.write(1, f'{what} {has_lost_a_rank(2)}\\n'.encode())\n"
        "def end(number, frame): say('lost'); sys.exit(1)\n"
        "signal.signal(signal.SIGTERM, end)\n"
        "say('before'); time.sleep(2)\n"
        "if sys.argv[1] == 'killed' and os.environ['RANK'] == '1': os.kill(os.getpid(), signal.SIGKILL)\n"
        "time.sleep(60)"
    )
    said = {}
    for how in ("killed", "stopped"):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        job = subprocess.Popen([*command, tmp_path / "ranks.py", how], stdout=subprocess.PIPE, text=True)
        assert [job.stdout.readline() for _ in range(2)] == ["before False\n"] * 2
        if how == "stopped":
            job.terminate()
        said[how] = job.communicate(timeout=60)[0]
    assert said == {"killed": "lost True\n", "stopped": "lost False\n" * 2}


def test_memory_that_is_freed_and_taken_again_costs_no_page_faults():
    faults = (
        "import resource; from cluster.processes import keep_freed_memory\n"
        "def faults():\n"
        "    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "    for _ in range(5): [bytearray(24 << 20) for _ in range(4)]\n"
        "    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before\n"
        "faults(); given_back = faults(); keep_freed_memory(); faults(); print(given_back, faults())"
    )
    given_back, kept = start(faults).communicate(timeout=60)[0].split()
    assert int(kept) < 100 < int(given_back)
