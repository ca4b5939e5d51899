"""What becomes of every family of causal language models: how it is packed, and whether vLLM computes its log-probs.

results/families/families.jsonl has a row for each, which docs/devices.md shows. A test tries it again and compares.
To try another one, give tiny_families.py what it needs, and run this with the rows to be written:

    UPDATE_FAMILIES=1 .venv/bin/python -m pytest -m "" -n 0 tests/engine/test_family_logprobs.py -k FAMILY
"""

import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_pair import start_pair
from safetensors import safe_open
from tiny_families import packed_scores, plain_scores, tiny_config, tiny_model
from tiny_policy import VOCAB, random_sequences, save_tiny_family
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from user_files import write_jsonl

from asyncrl.config import Config
from asyncrl.trainer import families
from asyncrl.trainer.families import COMPARED
from asyncrl.trainer.logprobs import TokenLogprobs
from asyncrl.trainer.weight_files import describe_differences, save_weights
from scripts.lines import read

ROWS = Path(__file__).parents[2] / "results" / "families" / "families.jsonl"
ALWAYS = ("gemma3_text", "lfm2")
"""Tried in every run: windows beside whole attention, and convolutions.

Plain Qwen3, its experts, and a family with buffers have engines in other files.
"""
SLOW = (
    "ernie4_5_moe", "gemma4_text", "glm4", "gpt2", "granite", "llama", "mistral", "mixtral", "olmo2", "phi3", "qwen2",
    "qwen3_5_text", "qwen3_moe", "qwen3_next",
)  # fmt: skip
"""Tried before a release; the others take minutes."""
ALLOWED = {"float32": 1e-5, "bfloat16": 0.05, "float16": 0.05}
"""Largest mean difference, nats per token; an update moves each of these models by 0.4 and more."""
NEED_TORCHVISION = ("qwen3_5_moe_text", "qwen3_5_text")
"""Families whose module in vLLM imports torchvision, which requirements-cpu.txt leaves out."""
LAYOUTS = {"one_row": "packed", "row_each": "a row each"}


def marks_of(family: str) -> list:
    if family in ALWAYS:
        return []
    return [pytest.mark.slow if family in SLOW else pytest.mark.study]


def recorded_rows() -> dict[str, dict]:
    """The rows of the record, by family; its first line says how it was made."""
    return {row["family"]: row for row in read(ROWS)[1:]}


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=marks_of(family))
        for family in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    ],
)
def test_a_family_is_what_its_row_says(family, tmp_path, monkeypatch, capfd):
    if family in NEED_TORCHVISION:
        pytest.importorskip("torchvision")
    monkeypatch.setattr(families, "COMPARED", (*COMPARED, family))
    row = {"family": family, "trainer": trainer_of(family), "engine": ""}
    if row["trainer"] in LAYOUTS.values():
        row["engine"] = engine_of(family, tmp_path, capfd)
    rows = recorded_rows()
    if "UPDATE_FAMILIES" in os.environ:
        rows[family] = row
        records = [read(ROWS)[0], *(rows[name] for name in sorted(rows))]
        write_jsonl(ROWS, records)
    assert row == rows[family]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_engine_and_trainer_agree_in_half_precision(dtype, model, tmp_path, capfd):
    """Faster, test_gpu_config.py shows that vLLM gets the dtype."""
    copy = shutil.copytree(model, tmp_path / "model")
    assert compare(str(copy), dtype, capfd) == "agrees"


def test_the_families_that_are_trained_are_those_whose_rows_agree():
    rows = recorded_rows()
    assert rows.keys() == MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys()
    agreeing = [name for name, row in rows.items() if row["engine"].startswith("agrees")]
    assert agreeing == list(COMPARED)


@torch.no_grad()
def trainer_of(family: str) -> str:
    """How sequences have to be packed to be read as each is alone; or why transformers computes no such model here."""
    try:
        module = TokenLogprobs(tiny_model(tiny_config(family)))
        sequences = random_sequences(4, seed=1)
        parts = [packed_scores(module, [sequence], "one_row") for sequence in sequences]
        alone = torch.cat(parts)
        if not torch.allclose(alone, plain_scores(module.model, sequences), atol=1e-4):
            return "logits that its head alone does not give"
        for layout, words in LAYOUTS.items():
            module.layout = layout
            if torch.allclose(packed_scores(module, sequences, layout), alone, atol=1e-4):
                return words
    except Exception as error:  # of any type: that a library fails is what is to be told
        return first_line(error)
    return "neither packed nor in rows of its own"


def engine_of(family: str, folder: Path, capfd) -> str:
    """Whether vLLM's engine for the CPU agrees with the trainer; or what happens."""
    from vllm import ModelRegistry

    has_own = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family] in ModelRegistry.get_supported_archs()
    if not has_own and family not in COMPARED:
        return "vLLM has no model of its own"
    model = save_tiny_family(family, str(folder / "model"))
    said = compare(model, "float32", capfd)
    if "requires BF16" in said:
        said = compare(model, "bfloat16", capfd).replace("agrees", "agrees in bfloat16")
    return said


def compare(model: str, dtype: str, capfd) -> str:
    """Whether both sides agree before and after an update, and saved names with those that were read."""
    tokens = tuple(np.random.default_rng(0).integers(3, VOCAB, 60).tolist())
    saved = Path(model).with_name("saved")
    try:
        with start_pair(Config(model=model, max_prompt_tokens=100, dtype=dtype)) as pair:
            for version in (1, 2):
                trainer = pair.trainer_logprobs(tokens[:1], tokens[1:], raw=True)
                engine = pair.run(pair.proxy.score(tokens))
                gap = np.abs(engine - trainer).mean()
                if not gap < ALLOWED[dtype]:
                    return f"differs by {gap:.1g} nats"
                pair.perturb()
                pair.sync(version)
            save_weights(pair.policy, str(saved))
            names = [spec.name for spec in pair.policy.sent_specs()]
            if describe_differences(str(saved), names) or names_in(saved) != names_in(Path(model)):
                return "saves other names than it reads"
    except Exception as error:  # as above
        roots = re.findall(r"\] (\w+(?:Error|Exception): .+)", "".join(capfd.readouterr()))
        return roots[0][:100] if roots else first_line(error)
    return "agrees"


def first_line(error: Exception) -> str:
    """The type of an error and the beginning of what it says."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:100]


def names_in(folder: Path) -> list[str]:
    """Names of the tensors in a folder's safetensors files."""
    names = []
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            names += tensors.keys()
    return sorted(names)
