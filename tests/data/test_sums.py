"""The task of questions in plain words: its splits, its answers, its prompt and its score."""

import re

import pytest
from tiny_policy import save_byte_llama

from asyncrl.config import Config
from asyncrl.tasks import load_task
from asyncrl.weights.models import load_tokenizer
from data.sums import Sums

LEVELS = tuple(Sums.LEVELS)


@pytest.mark.parametrize("level", LEVELS)
def test_the_answer_of_a_question_is_what_its_words_ask_for(level):
    Config(task=f"sums:{level}").checked()
    for problem in [
        *map(load_task(f"sums:{level}", 3).train_problem, range(200)),
        *Sums(level, 0).eval_problems(20),
    ]:
        numbers = [int(word) for word in re.findall(r"\d+", problem.prompt)]
        asked = numbers[0] + numbers[1] if "+" in problem.prompt else sorted(numbers)[3]
        assert int(problem.answer) == asked
        assert Sums.score(problem.answer, f"{problem.prompt} It is {asked}.") == 1.0
        assert Sums.score(problem.answer, f"It is {asked}, not {asked + 1}.") == 0.0


@pytest.mark.parametrize("level", LEVELS)
def test_no_question_is_met_in_training_that_is_held_out_in_any_order_of_its_numbers(level):
    def numbers(problem):
        return tuple(sorted(re.findall(r"\d+", problem.prompt)))

    held_out = {numbers(problem) for problem in Sums(level, 0).eval_problems(300)}
    for seed in (0, 1):
        assert held_out.isdisjoint(
            numbers(Sums(level, seed).train_problem(index)) for index in range(5000)
        )
    assert Sums(level, 0).eval_problems(5) == Sums(level, 1).eval_problems(300)[:5]


def test_of_a_hundred_one_digit_sums_22_are_held_out_and_all_others_are_trained():
    task = Sums("one_digit", 0)
    assert len(task.eval_problems(1000)) == 22
    assert len({task.train_problem(index).prompt for index in range(2000)}) == 78
    assert len(Sums("two_digits", 0).eval_problems(256)) == 256


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("12", 1),
        ("3 + 9 = 12.", 1),
        ("**12**\n", 1),
        ("12.0", 1),
        ("", 0),
        ("twelve", 0),
        ("1 2", 0),
        ("-12", 0),
    ],
)
def test_the_last_number_of_a_response_is_what_counts(response, reward):
    assert Sums.score("12", response) == reward


def test_an_answer_that_is_no_number_and_a_level_that_is_none_are_refused():
    with pytest.raises(ValueError):
        Sums.score("twelve", "12")
    with pytest.raises(
        ValueError, match="sums has no level 'three_digits'; levels are one_digit, two_digits"
    ):
        load_task("sums:three_digits", 0)
    with pytest.raises(ValueError, match="--task must be"):
        Config(task="sums:three_digits").checked()


def test_a_question_is_asked_under_a_system_prompt_through_the_chat_template(tmp_path):
    tokenizer = load_tokenizer(save_byte_llama(str(tmp_path)))
    task = Sums("one_digit", 0)
    problem = task.train_problem(0)
    text = tokenizer.decode(task.encode_prompt(problem, tokenizer))
    assert text == f"system: Answer briefly.\nuser: {problem.prompt}\nassistant: "
    tokenizer.chat_template = None
    assert (
        tokenizer.decode(task.encode_prompt(problem, tokenizer))
        == f"Answer briefly.\n\n{problem.prompt}"
    )
