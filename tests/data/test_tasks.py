"""Tasks: splits, determinism, the law of lengths, local datasets, and errors a user can act on."""

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from own_files import chat_tokenizer, write_jsonl

from asyncrl.config import MULTI_TURN_TASKS
from asyncrl.tasks import load_task, score_of
from asyncrl.weights.models import load_tokenizer, resolve_model
from data.addition import LABELS, Addition
from data.conversation import Conversation
from data.environments import ENVIRONMENTS
from data.gsm8k import INSTRUCTION
from data.problem import Problem

ROOT = Path(__file__).parents[2]
ROWS = [
    {
        "question": f"Ann has {i} apples and buys {i}. How many?",
        "answer": f"{i}+{i}\n#### {2 * i:,}",
    }
    for i in range(600, 640)
]


def response_tokens(problem) -> int:
    """A label and a digit per column, and the end of text."""
    return 2 * len(problem.answer.split()) + 1


def test_addition_answers_are_the_sum_in_labelled_digits():
    for index in range(500):
        problem = Addition(3).train_problem(index)
        digits, carry = [], 0
        for word in problem.prompt.split()[:-1]:
            carry, digit = divmod(int(word[1]) + int(word[2]) + carry, 10)
            digits.append(digit)
        words = problem.answer.split()
        assert [int(word[1]) for word in words] == [*digits, *[carry] * carry]
        assert "".join(word[0] for word in words) == LABELS[: len(words)]


def test_response_lengths_have_a_long_tail():
    lengths = [response_tokens(Addition(0).train_problem(index)) for index in range(20_000)]
    assert np.percentile(lengths, 99) >= 5 * np.median(lengths)
    assert max(lengths) <= 39


def test_prompt_and_response_have_one_token_per_label_column_and_digit():
    tokenizer = load_tokenizer(resolve_model("tiny", "addition"))
    for problem in Addition(1).eval_problems(200):
        assert (
            len(Addition(1).encode_prompt(problem, tokenizer))
            == 2 * len(problem.prompt.split()) - 1
        )
        assert len(tokenizer.encode(problem.answer)) + 1 == response_tokens(problem)


def test_train_and_held_out_problems_never_overlap():
    held_out = {problem.prompt for problem in Addition(0).eval_problems(3000)}
    assert len(held_out) == 3000
    for seed in (0, 1):
        assert held_out.isdisjoint(
            Addition(seed).train_problem(index).prompt for index in range(10_000)
        )


def test_problems_depend_on_seed_and_index_alone():
    forwards = [Addition(7).train_problem(index) for index in range(50)]
    task = Addition(7)
    assert [task.train_problem(index) for index in reversed(range(50))] == forwards[::-1]
    assert [Addition(8).train_problem(index) for index in range(50)] != forwards
    assert Addition(7).eval_problems(50) == Addition(8).eval_problems(100)[:50]


def test_problems_are_the_same_in_another_process():
    command = "from data.addition import Addition; print(Addition(7).train_problem(5), Addition(7).eval_problems(3))"
    here = f"{Addition(7).train_problem(5)} {Addition(7).eval_problems(3)}"
    other = subprocess.run(
        [sys.executable, "-c", command], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert other.stdout.strip() == here


def test_importing_tasks_imports_no_torch():
    command = "import sys, asyncrl.tasks; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", command], cwd=ROOT, check=True)


def test_own_answer_scores_one_and_a_changed_digit_zero():
    task = Addition(0)
    for problem in [*task.eval_problems(200), *map(task.train_problem, range(200))]:
        assert score_of("addition")(problem.answer, problem.answer) == 1.0
        changed = problem.answer[:-1] + str((int(problem.answer[-1]) + 1) % 10)
        assert score_of("addition")(problem.answer, changed) == 0.0
        assert score_of("addition")(problem.answer, problem.answer[:-3]) == 0.0


@pytest.mark.parametrize(
    "saved_as", ["jsonl files", "one jsonl file", "parquet files", "save_to_disk"]
)
def test_gsm8k_reads_local_copies(tmp_path, saved_as):
    import datasets

    path = tmp_path / "copy"
    splits = {"train": ROWS[:30], "test": ROWS[30:]}
    if saved_as == "one jsonl file":
        path = write_jsonl(tmp_path / "copy.jsonl", ROWS)
    elif saved_as == "save_to_disk":
        datasets.DatasetDict(
            {k: datasets.Dataset.from_list(v) for k, v in splits.items()}
        ).save_to_disk(str(path))
    else:
        path.mkdir()
        for name, rows in splits.items():
            if saved_as == "jsonl files":
                write_jsonl(path / f"{name}.jsonl", rows)
            else:
                datasets.Dataset.from_list(rows).to_parquet(str(path / f"{name}.parquet"))
    task = load_task("gsm8k", seed=0, data_path=str(path))
    held_out = task.eval_problems(1000)
    train = {task.train_problem(index).prompt for index in range(200)}
    assert len(held_out) + len(train) == 40
    assert train.isdisjoint(problem.prompt for problem in held_out)


def test_gsm8k_meets_every_problem_once_an_epoch_in_a_new_order(tmp_path):
    write_jsonl(tmp_path / "train.jsonl", ROWS[:30])
    write_jsonl(tmp_path / "test.jsonl", ROWS[30:])
    task = load_task("gsm8k", seed=0, data_path=str(tmp_path))
    epochs = [[task.train_problem(30 * epoch + i) for i in range(30)] for epoch in range(3)]
    assert all(len(set(epoch)) == 30 for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert load_task("gsm8k", seed=0, data_path=str(tmp_path)).train_problem(65) == epochs[2][5]
    assert len(task.eval_problems(4)) == 4


def test_gsm8k_scores_the_boxed_number_of_a_response(tmp_path):
    problem = load_task("gsm8k", 0, str(write_jsonl(tmp_path / "a.jsonl", ROWS))).train_problem(0)
    assert problem.answer.isdigit()
    assert (
        score_of("gsm8k")(problem.answer, f"Twice that is \\boxed{{{int(problem.answer):,}}}.")
        == 1.0
    )
    assert (
        score_of("gsm8k")(problem.answer, f"It is 3, no: \\boxed{{{int(problem.answer) + 1}}}.")
        == 0.0
    )
    assert score_of("gsm8k")(problem.answer, "I do not know") == 0.0
    assert score_of("gsm8k")(problem.answer, "") == 0.0


def test_gsm8k_prompt_goes_through_the_chat_template(tmp_path):
    task = load_task("gsm8k", 0, str(write_jsonl(tmp_path / "a.jsonl", ROWS)))
    tokenizer, problem = chat_tokenizer(), task.train_problem(0)
    assert (
        tokenizer.decode(task.encode_prompt(problem, tokenizer))
        == f"[user]{problem.prompt}[assistant]"
    )
    assert problem.prompt.endswith(INSTRUCTION)
    tokenizer.chat_template = None
    assert tokenizer.decode(task.encode_prompt(problem, tokenizer)) == problem.prompt


def test_a_malformed_dataset_is_an_error_that_shows_the_row(tmp_path):
    with pytest.raises(ValueError, match="without a final number"):
        load_task(
            "gsm8k", 0, str(write_jsonl(tmp_path / "a.jsonl", [{"question": "?", "answer": "4"}]))
        )
    with pytest.raises(ValueError, match=r"has no text as its answer"):
        load_task(
            "gsm8k", 0, str(write_jsonl(tmp_path / "b.jsonl", [{"question": "?", "solution": "4"}]))
        )


@pytest.mark.parametrize("answer", [None, ["#### 4"], 4])
def test_a_row_without_a_text_is_named(tmp_path, answer):
    rows = [{"question": "?", "answer": answer}]
    with pytest.raises(ValueError, match=r"a\.jsonl, row 0 of train, has no text as its answer"):
        load_task("gsm8k", 0, str(write_jsonl(tmp_path / "a.jsonl", rows)))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"a\.jsonl cannot be had \(no rows\)"),
        (
            b'{"question": "\xff", "answer": "#### 1"}\n',
            r"a\.jsonl, line 1: 'utf-8' codec can't decode",
        ),
    ],
)
def test_a_file_that_holds_nothing_or_no_text_is_named(tmp_path, content, message):
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_task("gsm8k", 0, str(tmp_path / "a.jsonl"))


def test_a_missing_local_dataset_is_a_clear_error(tmp_path):
    with pytest.raises(
        ValueError, match="does not exist; --data-path takes a local copy of openai/gsm8k"
    ):
        load_task("gsm8k", 0, str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match=r"cannot be had \(.*\); --data-path takes"):
        load_task("gsm8k", 0, str(tmp_path))


def test_an_unreachable_dataset_is_a_quick_and_clear_error(tmp_path):
    command = "from asyncrl.tasks import load_task; load_task('gsm8k', 0)"
    # A closed port of this machine stands for the hub, so that the test says the same with a network.
    environment = {
        "PATH": "",
        "HOME": str(tmp_path),
        "HF_HOME": str(tmp_path),
        "HF_ENDPOINT": "http://127.0.0.1:9",
    }
    started = time.monotonic()
    process = subprocess.run(
        [sys.executable, "-c", command], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    last_line = process.stderr.strip().splitlines()[-1]
    assert last_line.startswith("ValueError: dataset openai/gsm8k cannot be had")
    assert "--data-path takes a local copy" in last_line
    assert time.monotonic() - started < 20


def test_without_the_hub_its_local_cache_is_read(tmp_path):
    import datasets

    commit = "0" * 40
    repository = tmp_path / "hub" / "datasets--openai--gsm8k"
    part = repository / "snapshots" / commit / "main"
    part.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    for name, rows in (("train", ROWS[:30]), ("test", ROWS[30:])):
        datasets.Dataset.from_list(rows).to_parquet(str(part / f"{name}-00000-of-00001.parquet"))
    command = (
        "from asyncrl.tasks import load_task; print(len(load_task('gsm8k', 0).eval_problems(100)))"
    )
    environment = {
        "PATH": "",
        "HOME": str(tmp_path),
        "HF_HOME": str(tmp_path),
        "HF_ENDPOINT": "http://127.0.0.1:9",
    }
    options = {"cwd": ROOT, "env": environment, "capture_output": True, "text": True}
    process = subprocess.run([sys.executable, "-c", command], **options)
    assert process.stdout.strip() == "10", process.stderr


def test_reasoning_gym_problems_are_repeatable_distinct_splits_that_score_one():
    task, again = (load_task("reasoning_gym:basic_arithmetic", seed=0) for _ in range(2))
    train, held_out = [task.train_problem(index) for index in range(300)], task.eval_problems(50)
    assert [again.train_problem(299), again.train_problem(0)] == [train[299], train[0]]
    assert len({problem.prompt for problem in held_out}) == 50
    assert {p.prompt for p in train}.isdisjoint(p.prompt for p in held_out)
    assert load_task("reasoning_gym:basic_arithmetic", seed=1).train_problem(0) != train[0]
    for problem in train[:20]:
        right = json.loads(problem.answer)["answer"]
        assert (
            score_of("reasoning_gym:basic_arithmetic")(
                problem.answer, f"so <answer>{right}</answer>"
            )
            == 1.0
        )
        assert (
            score_of("reasoning_gym:basic_arithmetic")(problem.answer, "<answer>x</answer>") < 1.0
        )
        assert score_of("reasoning_gym:basic_arithmetic")(problem.answer, "no tags") == 0.0


def test_an_unknown_reasoning_gym_dataset_is_an_error_with_close_names():
    with pytest.raises(
        ValueError, match=r"no dataset 'basic_arithmetics'; .* nearest are .*basic_arithmetic"
    ):
        load_task("reasoning_gym:basic_arithmetics", seed=0)


def test_a_reasoning_gym_dataset_that_json_would_break_is_refused():
    with pytest.raises(ValueError, match="cannot be used here"):
        load_task("reasoning_gym:arc_agi", seed=0)


def test_held_out_lakes_are_never_met_in_training():
    task = load_task("frozen_lake", seed=0)
    held_out = {task.first_observation(problem) for problem in task.eval_problems(300)}
    assert len(held_out) > 80
    for seed in (0, 1):
        train = load_task("frozen_lake", seed)
        lakes = {train.first_observation(train.train_problem(index)) for index in range(700)}
        assert len(lakes) > 250
        assert held_out.isdisjoint(lakes)


def test_held_out_numbers_have_seeds_of_their_own():
    task = load_task("guess_number", seed=0)
    held_out = {problem.environment_seed for problem in task.eval_problems(1000)}
    assert held_out.isdisjoint(
        task.train_problem(index).environment_seed for index in range(10_000)
    )
    assert len(held_out) == 1000


@pytest.mark.parametrize("name", MULTI_TURN_TASKS)
def test_problems_of_an_environment_are_repeatable_seeds(name):
    task, again, other = load_task(name, seed=0), load_task(name, seed=0), load_task(name, seed=1)
    problems = [task.train_problem(index) for index in range(50)]
    assert [again.train_problem(index) for index in reversed(range(50))] == problems[::-1]
    assert [other.train_problem(index) for index in range(50)] != problems
    assert task.eval_problems(20) == other.eval_problems(50)[:20]
    assert all(problem == Problem("", "", problem.environment_seed) for problem in problems)
    assert all(0 <= problem.environment_seed < 2**31 for problem in problems)


@pytest.mark.parametrize("name", MULTI_TURN_TASKS)
def test_prompt_of_an_environment_is_its_first_observation_in_the_chat_template(name):
    task, tokenizer = load_task(name, seed=0), load_tokenizer(resolve_model("tiny", name))
    for index in range(20):
        problem = task.train_problem(index)
        observation, _ = ENVIRONMENTS[name]().reset(seed=problem.environment_seed)
        tokens = task.encode_prompt(problem, tokenizer)
        assert tokens == Conversation(tokenizer).first(observation)
        assert tokenizer.decode(tokens) == f"{observation}<assistant>"
    with pytest.raises(ValueError, match="has no chat template"):
        task.encode_prompt(problem, load_tokenizer(resolve_model("tiny", "addition")))


def test_an_unknown_task_is_an_error_with_the_list():
    message = (
        "'additions' is none of addition, gsm8k, jsonl, reasoning_gym, sums, nor FILE.py:NAME; "
    )
    message += "did you mean addition?"
    with pytest.raises(ValueError, match=message):
        load_task("additions", seed=0)


@pytest.mark.parametrize(
    ("task", "answer"), [("addition", " "), ("gsm8k", "ten apples"), ("subtraction", "1")]
)
def test_a_malformed_answer_or_task_raises_and_never_scores_zero(task, answer):
    with pytest.raises(ValueError):
        score_of(task)(answer, "1")
