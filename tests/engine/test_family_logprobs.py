"""Every family that is trained: vLLM computes the log-probs that the trainer computes, before and after an update.

To try another family, add it to COMPARED in asyncrl/trainer/families.py, give tests/tiny_families.py what it needs, and
run `.venv/bin/python -m pytest -m "" tests/engine/test_family_logprobs.py tests/trainer/test_families.py -k FAMILY`.
"""

from pathlib import Path

import numpy as np
import pytest
from engine_pair import start_pair
from safetensors import safe_open
from tiny_families import save_tiny_family
from tiny_policy import VOCAB

from asyncrl.config import Config
from asyncrl.trainer.checkpoint import differing_names, save_weights
from asyncrl.trainer.families import COMPARED

ALWAYS = ("gemma3_text", "gpt2", "qwen3_moe")
"""Tried in every run: windows beside whole attention, transposed matrices and learned positions, and experts.

Plain Qwen3 and a family with buffers have engines in other files.
"""
SLOW = (
    "ernie4_5_moe", "gemma4_text", "glm4", "granite", "llama", "mistral", "mixtral", "olmo2", "phi3", "qwen2",
)  # fmt: skip
"""Tried before a release; the others take minutes."""
ALLOWED = 1e-5
"""Largest mean difference, nats per token, in float32."""


def marks_of(family: str) -> list:
    if family in ALWAYS:
        return []
    return [pytest.mark.slow if family in SLOW else pytest.mark.study]


def names_in(folder: Path) -> list[str]:
    """Names of the tensors in a folder's safetensors files."""
    names = []
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            names += tensors.keys()
    return sorted(names)


@pytest.mark.parametrize(
    "family", [pytest.param(family, marks=marks_of(family)) for family in COMPARED]
)
def test_engine_and_trainer_agree_and_what_is_saved_has_the_names_of_what_was_read(
    family, tmp_path
):
    tokens = tuple(np.random.default_rng(0).integers(3, VOCAB, 60).tolist())
    model, saved = tmp_path / "model", tmp_path / "saved"
    save_tiny_family(family, str(model))
    with start_pair(Config(model=str(model), max_prompt_tokens=100)) as pair:
        for version in (1, 2):
            trainer = pair.trainer_logprobs(tokens[:1], tokens[1:], raw=True)
            engine = pair.run(pair.proxy.score(tokens))
            assert np.abs(engine - trainer).mean() < ALLOWED
            pair.perturb()
            pair.sync(version)
        save_weights(pair.policy, str(saved))
        assert not differing_names(str(saved), [spec.name for spec in pair.policy.sent_specs()])
    assert names_in(saved) == names_in(model)
