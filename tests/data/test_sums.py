"""The task of questions in plain words: its answers, its prompt and its score."""

import re

import pytest
from tiny_policy import save_byte_llama

from asyncrl.config import Config
from asyncrl.weights.models import load_tokenizer
from data.sums import Sums


@pytest.mark.parametrize("level", Sums.LEVELS)
def test_the_answer_of_a_question_is_what_its_words_ask_for(level):
    Config(task=f"sums:{level}").checked()
    task = Sums(level, 3)
    for problem in [*map(task.train_problem, range(200)), *task.eval_problems(20)]:
        numbers = [int(word) for word in re.findall(r"\d+", problem.prompt)]
        asked = numbers[0] + numbers[1] if "+" in problem.prompt else sorted(numbers)[3]
        assert int(problem.answer) == asked
        assert Sums.score(problem.answer, f"{problem.prompt} It is {asked}.") == 1.0
        assert Sums.score(problem.answer, f"It is {asked}, not {asked + 1}.") == 0.0


@pytest.mark.parametrize(
    ("responses", "score"),
    [(("12", "3 + 9 = 12.", "**12**\n", "12.0"), 1), (("", "twelve", "1 2", "-12"), 0)],
)
def test_the_last_number_of_a_response_is_what_counts(responses, score):
    assert [Sums.score("12", response) for response in responses] == [score] * 4


def test_a_question_is_asked_under_a_system_prompt_through_the_chat_template(tmp_path):
    tokenizer = load_tokenizer(save_byte_llama(str(tmp_path)))
    task = Sums("one_digit", 0)
    problem = task.train_problem(0)
    text = tokenizer.decode(task.encode_prompt(problem, tokenizer))
    assert text == f"system: Answer briefly.\nuser: {problem.prompt}\nassistant: "
    tokenizer.chat_template = None
    text = tokenizer.decode(task.encode_prompt(problem, tokenizer))
    assert text == f"Answer briefly.\n\n{problem.prompt}"
