"""Where the weights of --model are, and which folders are refused. Other mistakes are in tests/errors.toml."""

import json
import pickle

import pytest
from tiny_policy import save_tiny_model

from asyncrl.trainer.families import read_config
from asyncrl.weights.models import resolve_model


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
        read_config(folder, "off")
