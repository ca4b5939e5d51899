"""The shell scripts, in a copy of the repository whose train_async.py is a stub, with all requirements met."""

import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from scripts.runs import load, readable_summary

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted([*ROOT.glob("scripts/*.sh"), ROOT / ".ci" / "run"])
RECORDED = ROOT / "results/smollm2/one_digit-s0"
HAVE = f"numpy=={version('numpy').split('+')[0]}"
TRAIN = f"""
import json, pathlib, shutil, sys
print("train_async.py got", json.dumps(sys.argv[1:]))
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
if given["--steps"] == "13":
    sys.exit(3)
run = pathlib.Path(given["--runs-dir"], given["--run-name"])
shutil.copytree({str(RECORDED)!r}, run)
"""


@pytest.fixture
def copy(tmp_path):
    """A repository of the scripts alone; its pip would fail the test by not being there to install anything."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    (tmp_path / "asyncrl").mkdir()
    shutil.copy(ROOT / "asyncrl/config.py", tmp_path / "asyncrl")
    for name in ("requirements-common", "requirements", "requirements-cpu"):
        (tmp_path / f"{name}.txt").write_text(f"{HAVE}  # it is there\n")
    write_groups(tmp_path, flash_attn=HAVE)
    (tmp_path / "train_async.py").write_text(TRAIN)
    write_program(
        tmp_path / ".venv/bin/python",
        f'#!/bin/sh\n[ "$1 $2" != "-m pip" ] || [ "$3" = --version ] || exit 1\nexec {sys.executable} "$@"\n',
    )
    write_nvidia_smi(tmp_path)
    return tmp_path


def write_nvidia_smi(
    copy, driver_version="580.65.06", compute_cap="9.0", table="CUDA Version: 13.0"
):
    answers = {
        "-L": "GPU 0: one",
        "*driver_version*": driver_version,
        "*compute_cap*": compute_cap,
        "*": table,
    }
    cases = "".join(f"{pattern}) printf '%s\\n' '{text}' ;;\n" for pattern, text in answers.items())
    write_program(copy / "fake/nvidia-smi", f'#!/bin/sh\ncase "$*" in\n{cases}esac\n')


def write_groups(copy, flash_attn, settings=""):
    groups = f'[dependency-groups]\ndev = ["{HAVE}"]\nflash-attn = ["{flash_attn}"]\n'
    (copy / "pyproject.toml").write_text(groups + settings)


def write_program(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def run_script(copy, name, *arguments):
    environment = os.environ | {"PATH": f"{copy / 'fake'}:{os.environ['PATH']}"}
    return subprocess.run(
        ["bash", f"scripts/{name}", *arguments],
        cwd=copy,
        env=environment,
        capture_output=True,
        text=True,
        timeout=180,
    )


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_the_shell_can_read_every_script(script):
    subprocess.run(["bash", "-n", script], check=True)


def test_what_ci_runs_is_executable():
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_every_requirement_is_pinned_and_says_why():
    groups = (ROOT / "pyproject.toml").read_text().partition("[tool.ruff]")[0]
    texts = [path.read_text() for path in ROOT.glob("requirements*.txt")] + [groups]
    pins = [
        line
        for text in texts
        for line in text.splitlines()
        if "==" in line and not line.startswith("#")
    ]
    assert len(pins) > 20
    for line in pins:
        pin, _, why = line.partition("#")
        assert pin.count("==") == 1 and why.strip(), line


def test_an_environment_that_has_everything_is_recognised_and_then_trusted(copy):
    first, second = run_script(copy, "install.sh"), run_script(copy, "install.sh")
    assert first.returncode == 0 and "for the GPU: nvidia-smi lists 1" in first.stdout, first.stderr
    assert "done" in first.stdout and "up to date" in second.stdout


def test_a_changed_pin_is_installed_and_a_failure_is_an_error(copy):
    run_script(copy, "install.sh")
    (copy / "requirements.txt").write_text("numpy==0.0.1\n")
    result = run_script(copy, "install.sh")
    assert result.returncode == 1 and "numpy==0.0.1" in result.stderr
    assert "up to date" not in run_script(copy, "install.sh").stdout


def test_a_flash_attn_that_does_not_install_is_told_and_stops_nothing(copy):
    write_groups(copy, flash_attn="flash-attn==0.0.1")
    result = run_script(copy, "install.sh", "--flash-attn")
    assert result.returncode == 0, result.stderr
    assert "flash-attn FAILED" in result.stdout and "torch's own attention" in result.stdout


def test_flash_attn_is_not_tried_unless_asked_for(copy):
    write_groups(copy, flash_attn="flash-attn==0.0.1")
    result = run_script(copy, "install.sh")
    assert result.returncode == 0 and "flash-attn" not in result.stdout


@pytest.mark.parametrize(
    ("capabilities", "built_for"),
    [("9.0", "90"), ("8.9", "80"), ("12.0", "120"), ("9.0\n9.0\n8.6", "80;90"), ("", None)],
)
def test_flash_attn_is_compiled_for_the_gpus_that_are_there(copy, capabilities, built_for):
    write_groups(copy, flash_attn="flash-attn==0.0.1")
    write_nvidia_smi(copy, compute_cap=capabilities)
    pip = f'[ "$1 $2 $3" != "-m pip install" ] || echo "${{FLASH_ATTN_CUDA_ARCHS-all}}" >{copy}/built_for\n'
    pip += '[ "$2 $3" != "pip show" ] || exit 1\n'
    write_program(
        copy / ".venv/bin/python", f'#!/bin/sh\n{pip}[ "$2" = pip ] || exec {sys.executable} "$@"\n'
    )
    result = run_script(copy, "install.sh", "--flash-attn")
    assert (copy / "built_for").read_text().strip() == (built_for or "all"), (
        result.stdout + result.stderr
    )
    assert (f"compiles for sm_{built_for}," if built_for else "compiles, for") in result.stdout


@pytest.mark.parametrize(
    ("driver", "cuda", "is_enough"),
    [
        ("580.65.06", "13.0", True),
        ("570.133", "12.8", False),
        ("570.133", "13.0", True),
        ("[N/A]", "13.0", True),
    ],
)
def test_a_driver_that_is_too_old_for_torch_is_told_in_a_line(copy, driver, cuda, is_enough):
    write_nvidia_smi(
        copy, driver_version=driver, table=f"Driver Version: {driver}   CUDA Version: {cuda}"
    )
    result = run_script(copy, "install.sh")
    assert (result.returncode == 0) == is_enough
    errors = [line for line in result.stderr.splitlines() if line.startswith("install: error")]
    reason = f"the NVIDIA driver is {driver}, and torch, which is built for CUDA 13,"
    assert len(errors) == (not is_enough) and all(reason in line for line in errors)


def test_an_option_that_the_installation_does_not_have_is_an_error(copy):
    result = run_script(copy, "install.sh", "--develop")
    assert result.returncode == 1 and "--develop is no option" in result.stderr


TESTS = """
import pytest
@pytest.mark.gpu
def test_gpu(): pytest.skip("there is none")
def test_fine(): pass
@pytest.mark.slow
def test_long(): pass
def test_bad(): assert False
@pytest.mark.e2e
def test_whole(): pass
"""


@pytest.mark.parametrize(
    ("options", "refused", "status", "closing"),
    [
        (["-k", "gpu or bad or whole or long"], "", 1, ["1 failed", "1 passed"]),
        (["-k", "fine"], "format", 1, ["1 passed"]),
        pytest.param(["--slow"], "", 0, ["1 passed"], marks=pytest.mark.slow),
        pytest.param(["--all", "-k", "gpu"], "", 1, [], marks=pytest.mark.slow),
    ],
)
def test_the_tests_end_with_what_ran_and_what_lint_refused_and_fail_if_nothing_ran(
    copy, options, refused, status, closing
):
    settings = (ROOT / "pyproject.toml").read_text()
    write_groups(copy, flash_attn=HAVE, settings=settings[settings.index("[tool.ruff]") :])
    (copy / "tests").mkdir()
    (copy / "tests/test_one.py").write_text(TESTS)
    write_program(copy / ".venv/bin/ruff", f'#!/bin/sh\n[ "$1" != "{refused}" ]\n')
    result = run_script(copy, "test.sh", *options)
    assert result.returncode == status, result.stdout + result.stderr
    assert [line.split()[2] for line in result.stderr.splitlines() if " ruff " in line] == (
        [refused] if refused else []
    )
    ends = [
        " ".join(line.strip("= ").split()[:2]).strip(",")
        for line in result.stdout.splitlines()[-len(closing) :]
    ]
    assert ends == closing if closing else "error: no test was run" in result.stderr


def test_quickstart_passes_options_on_and_ends_with_the_summary(copy):
    options = ["--steps", "2", "--runs-dir", "my runs", "--run-name", "mine"]
    result = run_script(copy, "quickstart.sh", *options)
    assert result.returncode == 0, result.stderr
    passed = json.loads(
        next(line for line in result.stdout.splitlines() if "train_async.py got" in line)[19:]
    )
    assert passed[0] == "--run-name" and passed[2:] == options
    summary = readable_summary(load(RECORDED).metrics)
    assert summary and all(value in result.stdout for value in summary.values())
    assert "my runs/mine/report.html" in result.stdout
    assert (copy / "my runs/mine/report.html").exists()


def test_quickstart_keeps_the_status_of_a_failed_run_and_names_its_directory(copy):
    result = run_script(copy, "quickstart.sh", "--steps", "13")
    assert result.returncode == 3
    assert "ended with status 3" in result.stderr and "runs/quickstart-" in result.stderr


def test_quickstart_refuses_a_mistake_before_it_starts_anything(copy):
    result = run_script(copy, "quickstart.sh", "--no-such-option", "1")
    assert result.returncode != 0 and "train_async.py got" not in result.stdout
