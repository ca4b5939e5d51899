"""The scripts of docs/devices.md for SLURM, with stand-ins for srun and scontrol: every node is this host."""

import os
import re
import subprocess
import sys

import pytest
from programs import ROOT
from real_job import SMALL, words_of

from asyncrl.job.command_line import read_options
from scripts.lines import read

SCRIPTS = re.findall(
    r"```bash\n(#!.+?)```", (ROOT / "docs/devices.md").read_text(encoding="utf-8"), re.DOTALL
)
SRUN = """#!/usr/bin/env bash
[ "$1" = --kill-on-bad-exit ] && shift
for ((node = 0; node < SLURM_JOB_NUM_NODES; node++)); do
    SLURM_NODEID=$node SLURMD_NODENAME=127.0.0.1 "$@" &
    tasks+=($!)
done
for task in "${tasks[@]}"; do wait "$task" || status=$?; done
exit "${status:-0}"
"""
SCONTROL = "#!/usr/bin/env bash\nprintf '%s\\n' 127.0.0.1 another\n"


def test_there_is_a_script_for_one_node_and_for_two():
    assert [re.search(r"--nodes=(\d)", script)[1] for script in SCRIPTS] == ["1", "2"]
    for script in SCRIPTS:
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def run_job(folder, num_nodes, torchrun, words):
    """A script's job named `run`, with `torchrun` in the place of torchrun."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    script = folder / "job.sh"
    script.write_text(SCRIPTS[num_nodes - 1].replace(".venv/bin/torchrun", torchrun))
    slurm = {
        "SLURM_CPUS_PER_TASK": "1",
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NAME": "run",
        "SLURM_JOB_NODELIST": "127.0.0.1,another",
        "SLURM_JOB_NUM_NODES": str(num_nodes),
    }
    given = {"PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "TRAINERS": "1"}
    job = subprocess.run(
        ["bash", script, *words],
        cwd=ROOT,
        env=os.environ | slurm | given | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert job.returncode == 0, job.stderr[-3000:]
    return job.stdout


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_a_run_has_the_name_of_its_job_so_that_the_next_job_can_resume_it(tmp_path, num_nodes):
    lines = run_job(tmp_path, num_nodes, "echo", ["--seed", "7"]).splitlines()
    assert len(lines) == num_nodes
    for line in lines:
        config = read_options(line.partition("train_async.py ")[2].split())
        assert (config.run_name, config.seed) == ("run", 7)


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.parametrize("num_nodes", [1, 2])
def test_the_script_trains_on_every_node(tmp_path, num_nodes):
    options = SMALL | {"model": "tiny", "task": "addition", "max_prompt_tokens": 40, "steps": 2}
    options |= {"save_every": 0, "runs_dir": tmp_path / "runs"}
    torchrun = f"{sys.executable} -m torch.distributed.run"
    run_job(tmp_path, num_nodes, torchrun, words_of(options))
    run = tmp_path / "runs/run"
    metrics = read(run / "metrics.jsonl")
    assert [line["samples"] for line in metrics] == [32, 64]
    assert (run / "node_1").exists() == (num_nodes == 2)
