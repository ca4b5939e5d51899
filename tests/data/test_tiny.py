"""The tiny models of data/tiny know their games, and reinforcement learning has something to do."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrl.tasks import load_task
from asyncrl.weights.models import TINY_MODELS
from data.conversation import Conversation
from data.environments import ENVIRONMENTS

NUM_PROBLEMS = 256


@pytest.fixture(scope="module", params=("addition", *ENVIRONMENTS))
def tiny(request):
    """Name, model and tokenizer."""
    folder = TINY_MODELS / request.param
    model = AutoModelForCausalLM.from_pretrained(folder)
    return request.param, model, AutoTokenizer.from_pretrained(folder)


def num_won(tiny, **sampling):
    """Held-out games that the model wins."""
    name, _, tokenizer = tiny
    problems = load_task(name, 0).eval_problems(NUM_PROBLEMS)
    if name == "addition":
        turns = answers(tiny, [tokenizer.encode(problem.prompt) for problem in problems], sampling)
        wanted = [problem.answer for problem in problems]
        return sum(map(str.__eq__, tokenizer.batch_decode(turns, skip_special_tokens=True), wanted))
    conversation, games, won = Conversation(tokenizer), [], 0.0
    for problem in problems:
        environment = ENVIRONMENTS[name]()
        observation, _ = environment.reset(seed=problem.environment_seed)
        games.append((environment, conversation.first(observation)))
    while games:
        turns = answers(tiny, [tokens for _, tokens in games], sampling)
        running = []
        for (environment, tokens), turn in zip(games, turns, strict=True):
            action = tokenizer.decode(turn, skip_special_tokens=True)
            observation, reward, terminated, truncated, _ = environment.step(action)
            won += reward
            if not (terminated or truncated):
                reply = conversation.reply(observation, turn[-1] == tokenizer.eos_token_id)
                running.append((environment, tokens + turn + reply))
        games = running
    return won


def answers(tiny, prompts, sampling):
    """The model's next turn after each prompt, to its end or until it is cut."""
    name, model, tokenizer = tiny
    limit = 20 if name == "addition" else 4
    inputs = tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt")
    outputs = model.generate(**inputs, max_new_tokens=limit, **sampling)
    eos, turns = tokenizer.eos_token_id, outputs[:, inputs["input_ids"].shape[1] :].tolist()
    return [turn[: turn.index(eos) + 1] if eos in turn else turn for turn in turns]


def test_held_out_games_are_seldom_won_by_sampling_and_mostly_by_the_likeliest_tokens(tiny):
    torch.manual_seed(0)
    assert 0.15 <= num_won(tiny, do_sample=True, top_k=0) / NUM_PROBLEMS <= 0.5
    assert num_won(tiny, do_sample=False) / NUM_PROBLEMS >= 0.85
