import signal
import subprocess
import sys
import time

import psutil
import pytest
from programs import ROOT, wait_until

from asyncrl.cluster.processes import kill_session, without_torchrun


def start(code, *arguments, **options):
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, **options)


def test_torchruns_variables_are_taken_out_and_nothing_else():
    kept = {"HOME": "/h", "CUDA_VISIBLE_DEVICES": "1"}
    assert (
        without_torchrun(kept | {"RANK": "0", "MASTER_ADDR": "x", "TORCHELASTIC_RUN_ID": "y"})
        == kept
    )


@pytest.mark.parametrize(
    "steps", ["{watch}; {say}", "{say}; time.sleep(1); {watch}"], ids=["up", "still importing"]
)
def test_a_process_ends_with_its_parent(steps):
    steps = steps.format(watch="exit_with_parent(0.05)", say="print(os.getpid(), flush=True)")
    child = f"import os, time; from asyncrl.cluster.processes import exit_with_parent\n{steps}; time.sleep(60)"
    parent = start(
        f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(60)"
    )
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    wait_until(lambda: not psutil.pid_exists(pid))


@pytest.mark.parametrize(
    ("error", "reason", "status"),
    [
        ("SystemExit(3)", "SystemExit(3)", 3),
        ("SystemExit('no rows')", "SystemExit('no rows')", 1),
        ("SystemExit(0)", "SystemExit(0)", 1),
        ("KeyError('row')", "KeyError('row')", 1),
        ("ValueError('--steps')", "--steps", 2),
        ("Interrupted('stopped', 143)", "stopped", 143),
    ],
)
def test_a_rank_of_several_says_why_it_ends_and_has_the_status_of_its_error(error, reason, status):
    code = f"from asyncrl.cluster.processes import *\nend_by({error}, lambda: None)"
    rank = start(code, stderr=subprocess.PIPE)
    _, text = rank.communicate()
    assert (text.splitlines()[0], rank.returncode) == (f"error: {reason}", status)


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
    assert psutil.Process(leader.pid).status() == psutil.STATUS_ZOMBIE, (
        "it is ours to wait for, and we did not"
    )
    assert leader.wait() == -signal.SIGKILL


def test_a_rank_knows_whether_torchrun_ends_it_because_another_rank_is_gone(tmp_path):
    (tmp_path / "ranks.py").write_text(
        f"import os, signal, sys, time; sys.path.insert(0, {str(ROOT)!r})\n"
        "from asyncrl.cluster.processes import has_lost_a_rank\n"
        "def say(what): os.write(1, f'{what} {has_lost_a_rank()}\\n'.encode())\n"
        "def end(number, frame): say('lost'); time.sleep(1); sys.exit(1)  # the other looks, too\n"
        "signal.signal(signal.SIGTERM, end)\n"
        "say('before'); time.sleep(1)\n"
        "if sys.argv[1] == 'killed' and os.environ['RANK'] == '1': os.kill(os.getpid(), signal.SIGKILL)\n"
        "time.sleep(60)"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    jobs = {
        how: subprocess.Popen(
            [*command, tmp_path / "ranks.py", how], stdout=subprocess.PIPE, text=True
        )
        for how in ("killed", "stopped")
    }
    for job in jobs.values():
        assert [job.stdout.readline() for _ in range(2)] == ["before False\n"] * 2
    jobs["stopped"].terminate()
    said = {how: job.communicate(timeout=60)[0] for how, job in jobs.items()}
    assert said == {"killed": "lost True\n", "stopped": "lost False\n" * 2}


def test_what_is_alive_is_not_looked_at_for_garbage_and_what_comes_later_is():
    code = (
        "import gc, weakref; from asyncrl.cluster.processes import freeze_garbage\n"
        "class Ring:\n"
        "    def __init__(self): self.itself = self\n"
        "old, before = Ring(), len(gc.get_objects()); freeze_garbage()\n"
        "assert gc.get_freeze_count() > before / 2\n"
        "new = Ring(); gone, kept = weakref.ref(new), weakref.ref(old); del new, old; gc.collect()\n"
        "print(gone() is None, kept() is None)"
    )
    assert start(code).communicate(timeout=60)[0] == "True False\n"


def test_memory_that_is_freed_and_taken_again_costs_no_page_faults():
    faults = (
        "import resource; from asyncrl.cluster.processes import keep_freed_memory\n"
        "def faults():\n"
        "    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "    for _ in range(5): [bytearray(24 << 20) for _ in range(4)]\n"
        "    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before\n"
        "faults(); given_back = faults(); keep_freed_memory(); faults(); print(given_back, faults())"
    )
    given_back, kept = start(faults).communicate(timeout=60)[0].split()
    assert int(kept) < 100 < int(given_back)
