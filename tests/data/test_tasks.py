"""Tasks: splits, determinism, the law of lengths, local datasets, and errors a user can act on."""

import csv
import gc
import json
import re
import sys
import time
import warnings
from collections import Counter

import pytest
from datasets import Dataset, DatasetDict
from programs import run_python
from tokenizers.processors import TemplateProcessing
from user_files import chat_tokenizer, write_jsonl

from asyncrl.config import Config
from asyncrl.tasks import UserTask, load_task, score_of
from asyncrl.weights.models import load_tokenizer, resolve_model
from data.addition import LABELS, Addition
from data.gsm8k import INSTRUCTION
from data.sums import Sums

ROWS = [
    {
        "question": f"Ann has {i} apples and buys {i}. How many?",
        "answer": f"{i}+{i}\n#### {2 * i:,}",
    }
    for i in range(600, 640)
]
ROWS_OF = {"train": ROWS[:30], "test": ROWS[30:]}

# All tasks: how many training problems are looked at, and how many held-out ones there are of those asked for.
SPLITS = {
    "addition": (5000, 3000, 3000),
    "sums:one_digit": (1000, 22, 1000),
    "sums:two_digits": (5000, 256, 256),
    "gsm8k": (200, 10, 1000),
    "reasoning_gym:basic_arithmetic": (300, 50, 50),
    "frozen_lake": (100, 100, 100),
    "guess_number": (10_000, 1000, 1000),
}


def load(name, seed, folder):
    """A task; gsm8k has rows of its own."""
    if name != "gsm8k":
        return load_task(Config(task=name, seed=seed))
    for split, rows in ROWS_OF.items():
        write_jsonl(folder / f"{split}.jsonl", rows)
    return load_task(Config(task=name, seed=seed, data_path=str(folder)))


def asked(task, name, problem):
    """What a problem asks; sums ask the same in any order of their numbers."""
    if name.startswith("sums"):
        return tuple(sorted(re.findall(r"\d+", problem.prompt)))
    if name == "frozen_lake":
        return task.first_observation(problem)
    return problem.prompt or problem.environment_seed


@pytest.mark.parametrize("name", SPLITS)
def test_problems_depend_on_seed_and_index_alone_and_none_that_is_held_out_is_met_in_training(
    name, tmp_path
):
    num_train, num_held_out, num_asked = SPLITS[name]
    task, again, other = (load(name, seed, tmp_path) for seed in (0, 0, 1))
    problems = [task.train_problem(index) for index in range(50)]
    assert [again.train_problem(index) for index in reversed(range(50))] == problems[::-1]
    assert [other.train_problem(index) for index in range(50)] != problems
    held_out = task.eval_problems(num_asked)
    assert len(held_out) == len({repr(problem) for problem in held_out}) == num_held_out
    assert other.eval_problems(num_held_out)[:5] == held_out[:5] == task.eval_problems(5)
    keys = {asked(task, name, problem) for problem in held_out}
    for source in (task, other):
        trained = {asked(task, name, source.train_problem(index)) for index in range(num_train)}
        assert keys.isdisjoint(trained)


# Addition


def test_problems_are_the_same_in_every_process():
    problems = Addition(7).train_problem(5), Addition(7).eval_problems(3)[2]
    assert [problem.prompt for problem in problems] == ["a02 b01 c67 =", "a07 b70 ="]


def test_addition_asks_for_the_sum_in_labelled_digits_of_a_token_each():
    task, score = Addition(3), score_of("addition")
    tokenizer = load_tokenizer(resolve_model("tiny", "addition"))
    for problem in [*task.eval_problems(200), *map(task.train_problem, range(300))]:
        digits, carry = [], 0
        for word in problem.prompt.split()[:-1]:
            carry, digit = divmod(int(word[1]) + int(word[2]) + carry, 10)
            digits.append(digit)
        words = problem.answer.split()
        assert [int(word[1]) for word in words] == [*digits, *[carry] * carry]
        assert "".join(word[0] for word in words) == LABELS[: len(words)]
        num_tokens = len(task.encode_prompt(problem, tokenizer))
        assert num_tokens == 2 * len(problem.prompt.split()) - 1
        assert len(tokenizer.encode(problem.answer)) == 2 * len(words)
        changed = problem.answer[:-1] + str((int(problem.answer[-1]) + 1) % 10)
        responses = (problem.answer, changed, problem.answer[:-3])
        assert [score(problem.answer, response) for response in responses] == [1.0, 0.0, 0.0]


# Rows of files


def test_rows_are_met_once_an_epoch_in_a_new_order_and_ask_for_their_number(tmp_path):
    task = load("gsm8k", 0, tmp_path)
    epochs = [[task.train_problem(30 * epoch + i) for i in range(30)] for epoch in range(3)]
    assert all(len(set(epoch)) == 30 for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    for problem in epochs[0]:
        assert problem.prompt.endswith(INSTRUCTION)
        assert int(problem.answer) == 2 * int(problem.prompt.split()[2])


# Names of parts, and how many rows of each are trained on: all forms of a table are read by one rule.
PARTS = {
    ("train", "val"): [40, 0],
    ("train", "dev"): [40, 0],
    ("train", "valid"): [40, 0],
    ("train", "eval"): [40, 0],
    ("train", "held_out"): [40, 0],
    ("my_train", "my_TEST"): [40, 0],
    ("train_sft", "test_sft"): [40, 0],
    ("train", "test", "validation"): [40, 0, 0],
    ("train_a", "train_b", "validation_matched"): [40, 20, 0],
    ("contest", "latest"): None,
}


def write_jsonl_folder(folder, parts):
    for name, rows in parts.items():
        write_jsonl(folder / f"{name}.jsonl", rows)


def write_parquet_folder(folder, parts):
    folder.mkdir()
    for name, rows in parts.items():
        Dataset.from_list(rows).to_parquet(folder / f"{name}-00000-of-00001.parquet")


def write_folders(folder, parts):
    for name, rows in parts.items():
        write_jsonl(folder / name / "0.jsonl", rows)


def save_to_disk(folder, parts):
    DatasetDict({name: Dataset.from_list(rows) for name, rows in parts.items()}).save_to_disk(
        folder
    )


@pytest.mark.parametrize(
    "write", [write_jsonl_folder, write_parquet_folder, write_folders, save_to_disk]
)
def test_rows_that_a_name_calls_held_out_are_never_trained_on_in_any_form(write, tmp_path):
    for number, (names, num_trained) in enumerate(PARTS.items()):
        counts = num_trained or [40, 20]
        parts = {
            name: [{"prompt": f"{name} {i}", "answer": "1"} for i in range(count or 20)]
            for name, count in zip(names, counts, strict=True)
        }
        folder = tmp_path / str(number)
        write(folder, parts)
        if num_trained is None and write is write_folders:
            with pytest.raises(ValueError, match="it has the folders contest, latest; give one"):
                load_task(Config(task="jsonl", data_path=str(folder)))
            continue
        task = load_task(Config(task="jsonl", data_path=str(folder)))
        trained = Counter(problem.prompt.rpartition(" ")[0] for problem in task.train)
        if num_trained is not None:
            assert [trained[name] for name in names] == num_trained
            expected = names[1] if names[1].startswith("test") else names[-1]
            assert {problem.prompt.rpartition(" ")[0] for problem in task.held_out} == {expected}
        else:  # no name says anything: a hash holds out a tenth
            assert sum(trained.values()) + len(task.held_out) == 60
        counts = f"{len(task.train)} are trained on, {len(task.held_out)} are held out"
        assert task.summary.endswith(counts)


# Answers of a file, and what a reward gets: no value depends on the values of other rows.
ANSWERS = [
    ("rows.csv", "prompt,answer\na,007\nb,2.50\nc,None\nd,1e5\ne,12345678901234567890123\n"),
    ("rows.json", '[{"prompt": "a", "answer": "2024-01-02"}, {"prompt": "b", "answer": 1},'
     ' {"prompt": "c", "answer": 2.5, "least": 3}]'),
    ("rows.json", '{"prompt": "a", "answer": 1}\n{"prompt": "b", "answer": 2.5}\n'),
    ("rows.jsonl", '{"prompt": "a", "answer": "2024-01-02"}\n{"prompt": "b", "answer": 1, "least": 3}\n'),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text"), ANSWERS)
def test_a_reward_gets_what_the_file_has(name, text, tmp_path):
    (tmp_path / name).write_text(text)
    given = [
        json.loads(p.answer)
        for p in load_task(Config(task="jsonl", data_path=str(tmp_path / name))).rows
    ]
    if name.endswith("csv"):
        expected = list(csv.DictReader(text.splitlines()))
    elif text.startswith("["):
        expected = json.loads(text)
    else:
        expected = list(map(json.loads, text.splitlines()))
    assert sorted(given, key=lambda row: row["prompt"]) == expected


def test_a_file_of_held_out_rows_replaces_those_of_the_table_and_is_what_its_option_says(tmp_path):
    for name in ("train", "val"):
        write_jsonl(
            tmp_path / "d" / f"{name}.jsonl",
            [{"prompt": f"{name} {i}", "answer": "1"} for i in range(5)],
        )
    file = write_jsonl(tmp_path / "train_too.jsonl", [{"prompt": "other", "answer": "1"}])
    task = load_task(
        Config(task="jsonl", data_path=str(tmp_path / "d"), task_args=(f"test={file}",))
    )
    assert {problem.prompt for problem in task.train} == {f"train {i}" for i in range(5)}
    assert [problem.place for problem in task.held_out] == [f"{file}, row 0"]
    alone = load_task(Config(task="jsonl", data_path=str(tmp_path / "d" / "val.jsonl")))
    assert len(alone.rows) == 5 and alone.train[0].place.startswith(f"{tmp_path}/d/val.jsonl, row ")


# Prompts


def encoded(tmp_path, row, *task_args, change=None):
    """The text of the prompt of a row, and its tokens."""
    rows = [{"prompt": "other", "answer": "1"}] * 3 + [{"answer": "1"} | row]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    task = load_task(Config(task="jsonl", data_path=str(path), task_args=tuple(task_args)))
    tokenizer = chat_tokenizer()
    if change is not None:
        change(tokenizer)
    problem = next(problem for problem in task.rows if problem.place.endswith("row 3"))
    return tokenizer.decode(task.encode_prompt(problem, tokenizer))


USER = {"role": "user", "content": "Hi"}
BEGUN = {"role": "assistant", "content": "so <think>\n"}
CONTINUES = '"continue_final_message": true'


@pytest.mark.parametrize(
    ("row", "task_args", "text"),
    [
        ({"messages": [USER]}, (), "[user]Hi[assistant]"),
        ({"messages": [USER], "prompt": "Ho"}, (), "[user]Ho[assistant]"),
        (
            {"prompt": [USER, BEGUN]},
            [f"template={{{CONTINUES}}}"],
            "[user]Hi[assistant]so <think>\n",
        ),
        (
            {"messages": [USER, BEGUN]},
            [f'template={{{CONTINUES}, "add_generation_prompt": false}}', "system=S"],
            "[system]S[user]Hi[assistant]so <think>\n",
        ),
        ({"prompt": [USER]}, [f"template={{{CONTINUES}}}"], "[user]Hi[assistant]"),
        ({"prompt": "Hi"}, ['template={"add_generation_prompt": false}'], "[user]Hi"),
    ],
)
def test_the_policy_continues_what_the_row_says(row, task_args, text, tmp_path):
    assert encoded(tmp_path, row, *task_args) == text


def test_one_of_several_templates_is_taken_with_its_options_and_by_its_name(tmp_path):
    plain = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    templates = {"default": "{{ enable_thinking }}" + plain, "rag": "rag " + plain}

    def change(tokenizer):
        tokenizer.chat_template = templates

    row = {"prompt": "Hi"}
    assert encoded(tmp_path, row, 'template={"enable_thinking": 1}', change=change) == "1Hi"
    assert encoded(tmp_path, row, 'template={"chat_template": "rag"}', change=change) == "rag Hi"
    with pytest.raises(ValueError, match="has no enable_thinking"):
        options = 'template={"chat_template": "rag", "enable_thinking": 1}'
        encoded(tmp_path, row, options, change=change)


@pytest.mark.parametrize(("row", "text"), [("Hi", "<eos>Hi"), ("Hi<eos>", "<eos>Hi<eos>")])
def test_a_plain_prompt_ends_as_the_row_does_whatever_the_tokenizer_puts_behind_texts(
    row, text, tmp_path
):
    def change(tokenizer):
        around = TemplateProcessing(single="<eos> $A <eos>", special_tokens=[("<eos>", 0)])
        tokenizer.backend_tokenizer.post_processor = around
        tokenizer.chat_template = None

    assert encoded(tmp_path, {"prompt": row}, change=change) == text


OFFLINE = """
from pathlib import Path
import datasets
from asyncrl.config import Config
from asyncrl.tasks import load_task
try:
    load_task(Config(task="gsm8k"))
except ValueError as error:
    print(error)
for name, rows in {rows}.items():
    datasets.Dataset.from_list(rows).to_parquet({part!r} + f"/{{name}}-00000-of-00001.parquet")
print(len(load_task(Config(task="gsm8k")).eval_problems(100)))
"""


def test_without_the_hub_its_local_cache_is_read_and_otherwise_the_error_is_quick(tmp_path):
    """A closed port of this host stands for the hub, so that the test says the same with a network."""
    folder = str(tmp_path)
    hub = {"HOME": folder, "HF_HOME": folder, "HF_ENDPOINT": "http://127.0.0.1:9"}
    repository = tmp_path / "hub" / "datasets--openai--gsm8k"
    part = repository / "snapshots" / ("0" * 40) / "main"
    for made in (part, repository / "refs"):
        made.mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    started = time.monotonic()
    process = run_python("-c", OFFLINE.format(rows=ROWS_OF, part=str(part)), **hub)
    error, num_held_out = process.stdout.splitlines()
    assert error.startswith("dataset openai/gsm8k cannot be had")
    assert "--data-path takes a local copy" in error and num_held_out == "10"
    assert time.monotonic() - started < 20


# Scores


@pytest.mark.parametrize("level", Sums.LEVELS)
def test_the_answer_of_a_sum_is_what_its_words_ask_for(level):
    task = Sums(level, 3)
    assert task.system == "Answer briefly."
    for problem in [*map(task.train_problem, range(200)), *task.eval_problems(20)]:
        numbers = [int(word) for word in re.findall(r"\d+", problem.prompt)]
        asked = numbers[0] + numbers[1] if "+" in problem.prompt else sorted(numbers)[3]
        assert int(problem.answer) == asked


@pytest.mark.parametrize(
    ("name", "answer", "right", "wrong"),
    [
        ("gsm8k", "1224", ["So \\boxed{1,224}."], ["3, no: \\boxed{1225}.", "I do not know", ""]),
        (
            "sums",
            "12",
            ["12", "3 + 9 = 12.", "**12**\n", "12.0"],
            ["", "twelve", "1 2", "-12"],
        ),
    ],
)
def test_the_number_of_a_response_that_counts_is_the_boxed_or_the_last_one(
    name, answer, right, wrong
):
    score = score_of(name)
    assert {score(answer, response) for response in right} == {1.0}
    assert {score(answer, response) for response in wrong} == {0.0}


def test_reasoning_gym_scores_what_stands_between_its_tags():
    name = "reasoning_gym:basic_arithmetic"
    task, score = load_task(Config(task=name)), score_of(name)
    for problem in map(task.train_problem, range(20)):
        right = json.loads(problem.answer)["answer"]
        assert score(problem.answer, f"so <answer>{right}</answer>") == 1.0
        assert score(problem.answer, "no tags") == 0.0


def test_a_task_that_is_given_up_leaves_nothing_to_tidy_up(monkeypatch):
    """What the interpreter collects at its end may not raise there."""
    raised = []
    gc.collect()  # what other tests have left
    monkeypatch.setattr(sys, "unraisablehook", raised.append)
    task = UserTask(Config(), lambda: Addition(0))
    assert task.train_problem(3) == Addition(0).train_problem(3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del task
        gc.collect()
    assert not raised
