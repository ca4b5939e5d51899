"""The tiny model, as it lies in the repository's cache; made there first if it is absent."""

import json
import multiprocessing
import time
from pathlib import Path

import pytest
from ranks import forkserver

from data import tiny_model
from data.tasks import Addition
from data.tiny import TinyAdder, build_tokenizer

CACHE = Path(__file__).parents[2] / ".cache"


@pytest.fixture(scope="module")
def path() -> Path:
    return TinyAdder().path(CACHE)


@pytest.fixture(scope="module")
def model(path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path)


def test_tokenizer_maps_prompts_and_answers_onto_tokens_and_back(path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    for problem in Addition(0).eval_problems(300):
        for text in (problem.prompt, problem.answer):
            ids = tokenizer.encode(text)
            assert tokenizer.decode(ids) == text
            assert ids == build_tokenizer().encode(text)
    assert tokenizer.decode([tokenizer.eos_token_id], skip_special_tokens=True) == ""
    assert tokenizer.eos_token_id != tokenizer.pad_token_id


def test_model_is_small_and_fits_the_default_lengths(model):
    from asyncrl.config import Config

    assert model.num_parameters() <= 1_000_000
    assert model.config.max_position_embeddings >= Config().max_sequence_tokens
    assert model.config.head_dim in (32, 64, 80, 96, 128)  # vLLM's CPU attention


def test_held_out_accuracy_leaves_something_to_sharpen(model):
    problems = Addition(0).eval_problems(512)[256:]  # not those it was measured on when it was made
    tiny = TinyAdder()
    low, high = tiny.sampled_window
    assert low <= tiny.success_rate(model, problems, seed=1) <= high
    assert tiny.success_rate(model, problems, greedy=True) >= tiny.min_greedy


def test_problems_are_answered_together_as_each_is_alone(model, path):
    import torch

    tokenizer = build_tokenizer()
    problems = Addition(0).eval_problems(16)
    right = 0
    for problem in problems:
        ids = torch.tensor([tokenizer.encode(problem.prompt)])
        output = model.generate(ids, do_sample=False, max_new_tokens=64)[0, ids.shape[1] :]
        right += tokenizer.decode(output, skip_special_tokens=True) == problem.answer
    assert right / len(problems) == TinyAdder().success_rate(model, problems, greedy=True)


def test_the_same_steps_make_the_same_weights():
    import torch

    weights = []
    for _ in range(2):
        torch.manual_seed(len(weights))  # what happened before must not matter
        model = tiny_model.untrained_model(build_tokenizer())
        tiny_model.warm_up(model, TinyAdder().demonstrate(2000), 20)
        weights.append(torch.cat([parameter.flatten() for parameter in model.parameters()]))
    assert torch.equal(*weights)


def test_an_existing_model_is_found_at_once_and_says_what_it_is(path):
    started = time.monotonic()
    assert TinyAdder().path(CACHE) == path
    assert time.monotonic() - started < 5
    assert set(json.loads((path / "warm_up.json").read_text())) == {"sampled_accuracy", "greedy_accuracy"}


def make_slowly(directory: Path) -> None:
    (directory / "config.json").write_text("half")
    time.sleep(1)
    (directory / "config.json").write_text("whole")
    print(f"made by {multiprocessing.current_process().pid}", file=(directory.parent / "log").open("a"))


def ask(path: Path, found: multiprocessing.Queue) -> None:
    tiny_model.make_once(path, make_slowly)
    found.put((path / "config.json").read_text())


def test_two_processes_make_it_once_and_a_half_written_model_is_never_used(tmp_path):
    (tmp_path / "tiny-making").mkdir()
    (tmp_path / "tiny-making" / "config.json").write_text("left by a process that was killed")
    context = forkserver()
    found = context.Queue()
    processes = [context.Process(target=ask, args=(tmp_path / "tiny-0", found)) for _ in range(2)]
    for process in processes:
        process.start()
    assert [found.get(timeout=60) for _ in processes] == ["whole", "whole"]
    for process in processes:
        process.join(60)
    assert len((tmp_path / "log").read_text().splitlines()) == 1


def test_a_model_outside_the_accuracy_window_is_an_error():
    with pytest.raises(RuntimeError, match=r"0\.600 sampled and 0\.990 greedy; wanted"):
        TinyAdder().check(0.6, 0.99)
    with pytest.raises(RuntimeError):
        TinyAdder().check(0.3, 0.5)
    TinyAdder().check(0.3, 0.97)
