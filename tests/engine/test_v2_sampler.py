"""What vLLM's sampler for GPUs draws and says of it, which is no part of vLLM for the CPU: v2_sampler.py says how."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TRITON = "triton==3.7.1"
"""What torch 2.13.0 for CUDA wants."""

pytestmark = [pytest.mark.study, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Triton is installed into a folder of its own, which is kept: 0.7 GB."""
    folder, result = ROOT / ".cache" / TRITON, tmp_path_factory.mktemp("sampler") / "result"
    if not folder.exists():
        making = folder.with_name(f"{TRITON}-{os.getpid()}")
        options = ["--no-deps", "--only-binary=:all:", "-q", "--target", str(making), TRITON]
        made = subprocess.run(
            [sys.executable, "-m", "pip", "install", *options], capture_output=True, text=True
        )
        if made.returncode:
            pytest.skip(
                f"pip cannot install {TRITON}: {(made.stderr.strip().splitlines() or ['it says nothing'])[-1]}"
            )
        making.rename(folder)
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "TORCH"))
    }
    path = os.pathsep.join(map(str, (ROOT, ROOT / "tests", folder)))
    environment |= {"PYTHONPATH": path, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(
        [sys.executable, ROOT / "tests/v2_sampler.py", result],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(result.read_text())


@pytest.mark.parametrize("case", ["plain", "temperature", "top_p", "both", "top_k", "min_p", "all"])
def test_log_probs_are_the_trainers_and_tokens_are_drawn_by_them(found, case):
    of = found[case]
    assert of["gap"] < 1e-6 and of["differ"] == 0 and of["outside"] == 0
    assert of["p"] > 1e-3, "χ² of how often each token is drawn"


def test_the_kernels_for_few_requests_keep_the_same_tokens_and_greedy_takes_the_likeliest(found):
    assert found["split differs"] == found["greedy differs"] == 0
