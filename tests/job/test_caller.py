"""Programs that call train(): from which no run can start is said in one line, before anything is started."""

import subprocess
import sys

import pytest
from programs import ROOT, run_python

IMPORTS = "from asyncrl.config import Config\nfrom train_async import train\n\n"
CALL = "train(Config(runs_dir='runs'))\n"
GUARDED = f'if __name__ == "__main__":\n    {CALL}'
THREAD = f"threading.Thread(target=lambda: {CALL.strip()}).start()"
IN_THREAD = f'import threading\nif __name__ == "__main__":\n    {THREAD}\n'
UNGUARDED = (
    "this program calls train() whenever it is imported, as each process of a run does; put the call under "
    '`if __name__ == "__main__":`'
)


@pytest.mark.parametrize(
    ("program", "line"),
    [
        (CALL, UNGUARDED),
        (IN_THREAD, "where no signal can be handled; call it in the main thread"),
    ],
    ids=["unguarded", "thread"],
)
def test_a_program_that_cannot_call_train_ends_in_one_line(program, line, tmp_path):
    path = tmp_path / "program.py"
    path.write_text(IMPORTS + program)
    ended = run_python(path, cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert ended.stderr.count("\n") == 1 and ended.stderr.startswith("error: "), ended.stderr
    assert line in ended.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["program.py"]


def test_a_program_from_stdin_is_refused_as_no_process_can_import_it(tmp_path):
    program = IMPORTS + GUARDED
    ended = subprocess.run(
        [sys.executable, "-"], cwd=tmp_path, input=program, capture_output=True, text=True
    )
    line = "error: train() was called by the program <stdin>, which no other process can import; save it as a file\n"
    assert (ended.stderr, ended.returncode) == (line, 1)


def test_a_process_of_a_run_that_comes_to_the_call_again_ends_in_the_line(tmp_path):
    """The word `__main__` in a program is no proof that its call is guarded."""
    program = f"""import multiprocessing
{IMPORTS}
if __name__ != "__main__":
    {CALL}
if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=print)
    process.start()
    process.join()
    raise SystemExit(process.exitcode)
"""
    path = tmp_path / "program.py"
    path.write_text(program)
    ended = run_python(path, cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert (ended.stderr, ended.returncode) == (f"error: {UNGUARDED}\n", 1)
