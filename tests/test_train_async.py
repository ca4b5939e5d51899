"""How a job ends, for whoever reads its last lines: under a real torchrun, without a model."""

from programs import ROOT, run_python
from real_job import torchrun


def test_the_reason_is_among_the_last_lines_of_torchrun_too(tmp_path):
    """cluster/test_processes.py has the status of other errors."""
    script = tmp_path / "job.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); from train_async import run_job\n"
        "def job(): raise ValueError('--steps must be at least 1')\n"
        "run_job(job)"
    )
    done = run_python(*torchrun(), script)
    assert done.returncode == 1 and "error: --steps must be at least 1" in done.stderr.splitlines()
    assert "error: --steps must be at least 1" in done.stderr.splitlines()[-2]
    assert "exitcode  : 2" in done.stderr
