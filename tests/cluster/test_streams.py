"""What a program prints never ends it, however its terminal, pipe or disk is lost."""

import os
import pty
import signal
import subprocess
import sys
import time

import pytest
from programs import ROOT

PROGRAM = """
import ctypes, sys
from asyncrl.cluster.streams import keep_printing
keep_printing()
with open(sys.argv[1], "w") as file:
    for number in range(2000):
        print("\\u03b1", number)
        print("\\u03b2 \\ud83d", file=sys.stderr, flush=True)
    sys.stdout.write("no end of a line")
    ctypes.CDLL(None).puts(b"printed by C")
    file.write("done")
"""
"""It prints more than a pipe holds, by Python and by C, and says in a file that it has come to its end."""
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}
ASCII = {"PYTHONIOENCODING": "ascii"}
OLD_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def shell(redirection: str, path, code: str = PROGRAM, **variables) -> subprocess.CompletedProcess:
    """Run a program with a redirection; its exit status is that of the shell's first command."""
    command = f'"$0" -c "$1" "$2" {redirection}; exit ${{PIPESTATUS[0]}}'
    words = ["bash", "-c", command, sys.executable, code, str(path)]
    return subprocess.run(
        words,
        env=ENVIRONMENT | variables,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("redirection", "variables"),
    [
        ("| head -1", {}),
        ("| true", {}),
        ("2>&1 | head -1", {}),
        (">&-", {}),
        ("2>&-", {}),
        (">&- 2>&-", {}),
        ("<&- >&- 2>&-", {}),
        (">/dev/full", {}),
        (">/dev/full 2>&1", {}),
        ("", ASCII),
        ("", OLD_LOCALE),
        ("| head -1", {"PYTHONUNBUFFERED": "1"} | ASCII),
    ],
)
def test_a_program_comes_to_its_end_whatever_becomes_of_what_it_prints(
    tmp_path, redirection, variables
):
    end = shell(redirection, tmp_path / "end", **variables)
    assert end.returncode == 0 and (tmp_path / "end").read_text() == "done"
    assert "Traceback" not in end.stderr and "Exception ignored" not in end.stderr
    if not redirection:
        assert "\\u03b1 1999\n" in end.stdout and "\\u03b2 \\ud83d\n" in end.stderr
        assert end.stdout.endswith("no end of a line")


def test_a_program_comes_to_its_end_when_its_terminal_is_gone(tmp_path):
    ours, theirs = pty.openpty()
    words = [sys.executable, "-c", PROGRAM, tmp_path / "end"]
    program = subprocess.Popen(words, env=ENVIRONMENT, stdout=theirs, stderr=theirs)
    os.close(theirs)
    assert os.read(ours, 100)
    os.close(ours)
    assert program.wait(60) == 0 and (tmp_path / "end").read_text() == "done"


def test_nothing_is_lost_in_a_pipe_that_another_program_has_set_not_to_block(tmp_path):
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    words = [sys.executable, "-c", PROGRAM, tmp_path / "end"]
    program = subprocess.Popen(words, env=ENVIRONMENT, stdout=writer, stderr=writer)
    os.close(writer)
    time.sleep(0.5)  # the pipe is full by then
    with open(reader, encoding="utf-8") as pipe:
        lines = pipe.read().splitlines()
    assert program.wait(60) == 0
    assert [line for line in lines if "α" in line] == [f"α {number}" for number in range(2000)]


def test_a_script_loses_nothing_but_what_its_reader_leaves(tmp_path):
    code = PROGRAM.replace("keep_printing()", "keep_printing(BrokenPipeError)")
    assert shell("| head -1", tmp_path / "left", code).returncode == 0
    full = shell(">/dev/full", tmp_path / "full", code)
    assert full.returncode == 1 and "OSError: [Errno 28] No space left on device" in full.stderr


def test_a_run_prints_its_help_and_its_errors_to_a_reader_that_leaves():
    for words, status in (("--help", 0), ("--no-such-option", 2)):
        command = f'"$0" train_async.py {words} 2>&1 | true; exit ${{PIPESTATUS[0]}}'
        run = subprocess.run(
            ["bash", "-c", command, sys.executable],
            cwd=ROOT,
            env=ENVIRONMENT,
            capture_output=True,
            timeout=120,
            check=False,
        )
        assert (run.returncode, run.stderr) == (status, b"")


@pytest.mark.parametrize("is_ignored", [False, True])
def test_the_end_of_a_terminal_asks_a_run_to_stop_unless_it_is_started_by_nohup(is_ignored):
    code = (
        "import signal; from asyncrl.cluster.processes import ignore_signals, run_job\n"
        "run_job(lambda: signal.raise_signal(signal.SIGHUP))\n"
        "ignore_signals(); signal.raise_signal(signal.SIGHUP)"
    )
    handler = signal.SIG_IGN if is_ignored else signal.SIG_DFL
    run = subprocess.run(
        [sys.executable, "-c", code],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, handler),
    )
    expected = (0, "") if is_ignored else (129, "stopped by SIGHUP\n")
    assert (run.returncode, run.stderr) == expected
