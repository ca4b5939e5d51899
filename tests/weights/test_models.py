import json
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny_policy import save_tiny_model

from asyncrl.config import MULTI_TURN_TASKS
from asyncrl.weights.models import resolve_model

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "name", ["/no/such/folder", "no-such-model", "nobody/no-such-model", "a/b/c", "bad name!"]
)
def test_a_missing_model_is_one_line_within_seconds(name):
    start = time.monotonic()
    with pytest.raises(ValueError, match="--model") as caught:
        resolve_model(name, "addition")
    assert (
        name in str(caught.value)
        and "Qwen/Qwen3-8B-Base" in str(caught.value)
        and "\n" not in str(caught.value)
    )
    assert time.monotonic() - start < 15


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no config.json"):
        resolve_model(str(tmp_path), "addition")


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


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (only_a_pickle, "no *.safetensors, and weights of other formats are not read"),
        (cut_weights, "model.safetensors is cut off or broken"),
        (
            lambda folder: (folder / "model.safetensors").write_bytes(b"x" * 5000),
            "model.safetensors is cut off or",
        ),
        (no_tokenizer, "no tokenizer (tokenizer.json or the like)"),
        (
            lambda folder: change(
                folder / "config.json", model_type="its_own", auto_map={"AutoConfig": "own.Config"}
            ),
            "it brings its own code (auto_map in config.json), which is not run here",
        ),
    ],
)
def test_a_model_that_cannot_be_used_is_refused_in_one_line_that_says_what_to_do(
    tmp_path, spoil, message
):
    folder = Path(save_tiny_model(str(tmp_path)))
    assert resolve_model(str(folder), "addition") == str(folder)
    spoil(folder)
    with pytest.raises(ValueError) as caught:
        resolve_model(str(folder), "addition")
    assert (
        message in str(caught.value)
        and str(folder) in str(caught.value)
        and "\n" not in str(caught.value)
    )


def test_code_that_comes_with_a_model_is_neither_run_nor_asked_about(tmp_path):
    folder = Path(save_tiny_model(str(tmp_path)))
    change(folder / "config.json", auto_map={"AutoConfig": "own.Config"})
    assert resolve_model(str(folder), "addition") == str(folder), (
        "transformers has this kind of model itself"
    )
    change(folder / "config.json", model_type="its_own")
    code = f"import torch; from asyncrl.trainer.families import read_config; read_config({str(folder)!r}, False)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        input="y\n",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode != 0 and "[y/N]" not in done.stdout + done.stderr


def test_tiny_is_the_tiny_model_of_the_task():
    folders = {
        task: resolve_model("tiny", task) for task in ("addition", "jsonl", *MULTI_TURN_TASKS)
    }
    assert folders["jsonl"] == folders["addition"]
    assert len(set(folders.values())) == 1 + len(MULTI_TURN_TASKS)
    assert all("config.json" in os.listdir(folder) for folder in folders.values())


@pytest.mark.parametrize(
    "task", ["gsm8k", "reasoning_gym:chain_sum", "environment:/a/lake.py:Lake"]
)
def test_where_there_is_no_tiny_model_one_line_says_so(task):
    given = task.removeprefix("environment:")
    with pytest.raises(
        ValueError, match=rf"^--model tiny: there is no tiny model for --task {given}; give --model"
    ):
        resolve_model("tiny", task)


def test_a_name_that_is_nearly_one_made_here_is_said_to_be(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        ValueError, match=r"^--model tiney: .*tiny or smollm2; did you mean tiny\?$"
    ):
        resolve_model("tiney", "addition")
