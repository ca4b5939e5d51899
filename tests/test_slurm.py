"""The scripts of docs/devices.md for SLURM, with stand-ins for srun and scontrol: every node is this host."""

import os
import re
import subprocess
import sys

import pytest
from programs import ROOT
from real_job import SMALL, words_of

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


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.parametrize("num_nodes", [1, 2])
def test_the_script_trains_on_every_node(tmp_path, num_nodes):
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    torchrun = f"{sys.executable} -m torch.distributed.run"
    script = tmp_path / "job.sh"
    script.write_text(SCRIPTS[num_nodes - 1].replace(".venv/bin/torchrun", torchrun))
    options = SMALL | {"model": "tiny", "task": "addition", "max_prompt_tokens": 40, "steps": 2}
    options |= {"save_every": 0, "runs_dir": tmp_path / "runs", "run_name": "run"}
    slurm = {
        "SLURM_CPUS_PER_TASK": "1",
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NODELIST": "127.0.0.1,another",
        "SLURM_JOB_NUM_NODES": str(num_nodes),
    }
    given = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "TRAINERS": "1"}
    job = subprocess.run(
        ["bash", script, *words_of(options)],
        cwd=ROOT,
        env=os.environ | slurm | given | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert job.returncode == 0, job.stderr[-3000:]
    run = tmp_path / "runs/run"
    metrics = read(run / "metrics.jsonl")
    assert [line["samples"] for line in metrics] == [32, 64]
    assert (run / "node_1").exists() == (num_nodes == 2)
