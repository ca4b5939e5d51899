"""Every family that is trained: vLLM computes the log-probs that the trainer computes, before and after an update.

To try another family, add it to COMPARED in asyncrl/trainer/families.py, give tests/tiny_families.py what it needs, and
run `.venv/bin/python -m pytest -m "" tests/engine/test_family_logprobs.py tests/trainer/test_families.py -k FAMILY`.
"""

import multiprocessing
import os
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from engine_pair import Pair
from safetensors import safe_open
from tiny_families import save_tiny_family
from tiny_policy import VOCAB

from asyncrl.cluster.placement import WorkerPlacement
from asyncrl.config import Config
from asyncrl.engine.vllm_setup import worker_environment
from asyncrl.trainer.checkpoint import differing_names, save_weights
from asyncrl.trainer.families import COMPARED

ALWAYS = (
    "ernie4_5_moe", "gemma3_text", "gemma4_text", "glm4", "gpt2", "granite", "llama", "mistral", "mixtral", "olmo2",
    "phi3", "qwen2", "qwen3_moe",
)  # fmt: skip
"""Those that are tried in every run of the tests; the others take minutes."""
ALLOWED = 1e-5
"""Largest mean difference, nats per token, in float32."""


def begin() -> None:
    """Make a process ready to compare."""
    os.environ.update(worker_environment(WorkerPlacement(0, None, None, 1, 0.0)))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


@pytest.fixture(scope="module")
def comparer():
    """A process that compares one family after the other: vLLM takes seconds to import."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=begin) as pool:
        yield pool


def compare(family: str) -> tuple[list[float], list[str], list[str]]:
    """Return mean differences of a tiny random model, and names of tensors read and saved; in the other process."""
    tokens = tuple(np.random.default_rng(0).integers(3, VOCAB, 60).tolist())
    with tempfile.TemporaryDirectory() as folder:
        pair = Pair(
            Config(model=save_tiny_family(family, f"{folder}/model"), max_prompt_tokens=100)
        )
        differences = []
        try:
            for version in (1, 2):
                trainer = pair.trainer_logprobs(tokens[:1], tokens[1:], raw=True)
                differences.append(
                    float(np.abs(pair.run(pair.proxy.score(tokens)) - trainer).mean())
                )
                pair.perturb()
                pair.sync(version)
            save_weights(pair.policy, f"{folder}/saved")
            assert not differing_names(
                f"{folder}/saved", [spec.name for spec in pair.policy.sent_specs()]
            )
        finally:
            pair.run(pair.shutdown())  # or this process would wait for it at its exit
        return differences, names_in(f"{folder}/model"), names_in(f"{folder}/saved")


def names_in(folder: str) -> list[str]:
    """Names of the tensors in a folder's safetensors files."""
    names = []
    for file in Path(folder).glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            names += tensors.keys()
    return sorted(names)


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=() if family in ALWAYS else pytest.mark.study)
        for family in COMPARED
    ],
)
def test_engine_and_trainer_agree_and_what_is_saved_has_the_names_of_what_was_read(
    comparer, family
):
    differences, read, saved = comparer.submit(compare, family).result(timeout=180)
    assert max(differences) < ALLOWED
    assert saved == read
