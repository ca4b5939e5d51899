"""The tiny models of the environments, as they lie in the repository's cache; made there first if absent."""

import itertools
import json
import random
import time
from pathlib import Path

import pytest

from data import tiny_agent, tiny_model
from data.conversation import Conversation
from data.environments import ENVIRONMENTS, FrozenLake, GuessNumber, make_environment
from data.tasks import load_task
from data.tiny_agent import TinyAgent, build_tokenizer

CACHE = Path(__file__).parents[2] / ".cache"
LONGEST_PROMPT = {"frozen_lake": 6, "guess_number": 2}
LONGEST_RESPONSE = {"frozen_lake": 51, "guess_number": 18}
"""Tokens beyond the prompt of a game of one action a turn, end of turn and the environment's included."""


@pytest.fixture(scope="module", params=ENVIRONMENTS)
def name(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def path(name) -> Path:
    return TinyAgent(name).path(CACHE)


@pytest.fixture(scope="module")
def model(path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path)


def random_games(name: str, num_games: int):
    """Responses and observations of games with any actions, and some that are none."""
    rng, environment, task = random.Random(0), make_environment(name), load_task(name, seed=0)
    for index in range(num_games):
        observations, responses, is_over = [task.first_observation(task.train_problem(index))], [], False
        environment.reset(seed=task.train_problem(index).environment_seed)
        while not is_over:
            responses.append(rng.choice([*ENVIRONMENTS[name].ACTIONS, "correct"]))
            observation, _, terminated, truncated, _ = environment.step(responses[-1])
            observations.append(observation)
            is_over = terminated or truncated
        yield responses, observations


def test_tokenizer_maps_what_is_said_onto_tokens_and_back(name, path):
    from transformers import AutoTokenizer

    tokenizer, built = AutoTokenizer.from_pretrained(path), build_tokenizer()
    assert tokenizer.chat_template == built.chat_template
    for responses, observations in random_games(name, 200):
        for text in itertools.chain(responses, observations):
            ids = tokenizer.encode(text)
            assert tokenizer.decode(ids) == text
            assert ids == built.encode(text)
    assert all(len(tokenizer.encode(action)) == 1 for action in ENVIRONMENTS[name].ACTIONS)
    everything = list(range(len(tokenizer)))
    assert "<" not in tokenizer.decode(everything, skip_special_tokens=True)
    assert len({tokenizer.eos_token_id, tokenizer.pad_token_id, *tokenizer.encode("<assistant>")}) == 3


def test_games_have_the_few_tokens_that_are_promised(name):
    tokenizer, task = build_tokenizer(), load_task(name, seed=0)
    talk, longest = Conversation(tokenizer), 0
    assert {len(task.encode_prompt(p, tokenizer)) for p in task.eval_problems(100)} == {LONGEST_PROMPT[name]}
    for responses, observations in random_games(name, 300):
        between = [len(talk.reply(observation, ended=True)) for observation in observations[1:-1]]
        if "correct" not in responses:
            longest = max(longest, 2 * len(responses) + sum(between))
    assert longest == LONGEST_RESPONSE[name]


def test_model_is_small_and_fits_vllm(name, model):
    assert model.num_parameters() <= 1_000_000
    assert model.config.max_position_embeddings >= LONGEST_PROMPT[name] + LONGEST_RESPONSE[name]
    assert model.config.head_dim in (32, 64, 80, 96, 128)  # vLLM's CPU attention
    assert model.config.eos_token_id == model.generation_config.eos_token_id == build_tokenizer().eos_token_id


def test_held_out_success_leaves_something_to_sharpen(name, model):
    problems = load_task(name, seed=0).eval_problems(384)[256:]  # not those it was measured on when it was made
    tiny = TinyAgent(name)
    low, high = tiny.sampled_window
    assert low <= tiny.success_rate(model, problems, seed=1) <= high
    assert tiny.success_rate(model, problems, greedy=True) >= tiny.min_greedy


def test_the_scripted_player_wins_always_when_it_takes_the_best(name):
    task, environment = load_task(name, seed=0), make_environment(name)
    for problem in task.eval_problems(200):
        observations, actions, reward = [environment.reset(seed=problem.environment_seed)[0]], [], 0.0
        while not reward:
            chances = tiny_agent.player_distribution(name, actions, observations)
            assert sum(chances.values()) == pytest.approx(1) and list(chances) == list(ENVIRONMENTS[name].ACTIONS)
            actions.append(max(chances, key=chances.get))
            observation, reward, terminated, truncated, _ = environment.step(actions[-1])
            observations.append(observation)
            assert reward or not (terminated or truncated)


def test_best_actions_of_small_cases():
    assert tiny_agent.best_moves("P___\n____\n____\n___G") == ["down", "right"]
    assert tiny_agent.best_moves("____\n_O__\n__P_\nO__G") == ["down", "right"]
    assert tiny_agent.best_moves("____\n_O_O\n__PO\nOOOG") == ["left", "down", "right", "up"]  # no way: all alike
    assert tiny_agent.best_guess([], []) == "16"
    assert (
        tiny_agent.best_guess(["16", "30", "20"], [GuessNumber.HIGHER, GuessNumber.LOWER, GuessNumber.HIGHER]) == "25"
    )
    assert tiny_agent.best_guess(["correct"], [GuessNumber.NO_ACTION]) == "16"


def test_transcripts_imitate_the_player_at_his_own_tokens_alone(name):
    games, tokenizer = TinyAgent(name).demonstrate(20), build_tokenizer()
    for tokens, drawn_from, length in zip(games.tokens, games.imitated, games.lengths, strict=True):
        is_player = drawn_from != tiny_model.NOT_IMITATED
        own, imitated = tokens[is_player], games.distributions[drawn_from[is_player]]
        assert is_player[length - 1] and not is_player[length:].any()
        assert (imitated.sum(-1) - 1).abs().max() < 1e-5
        assert (imitated.gather(1, own[:, None]) > 0).all()
        assert set(tokenizer.convert_ids_to_tokens(own[::2])) <= set(ENVIRONMENTS[name].ACTIONS)
        assert (own[1::2] == tokenizer.eos_token_id).all()
        assert not is_player[: LONGEST_PROMPT[name]].any() and is_player[LONGEST_PROMPT[name]]


def test_the_same_steps_make_the_same_weights(name):
    import torch

    weights = []
    for _ in range(2):
        torch.manual_seed(len(weights))  # what happened before must not matter
        model = tiny_model.untrained_model(build_tokenizer())
        tiny_model.warm_up(model, TinyAgent(name).demonstrate(100), 5)
        weights.append(torch.cat([parameter.flatten() for parameter in model.parameters()]))
    assert torch.equal(*weights)


def test_an_existing_model_is_found_at_once_and_says_what_it_is(name, path):
    started = time.monotonic()
    assert TinyAgent(name).path(CACHE) == path
    assert time.monotonic() - started < 5
    assert set(json.loads((path / "warm_up.json").read_text())) == {"sampled_accuracy", "greedy_accuracy"}


def test_a_model_outside_the_success_window_is_an_error():
    with pytest.raises(RuntimeError, match=r"frozen_lake .* 0\.600 sampled and 0\.990 greedy; wanted"):
        TinyAgent("frozen_lake").check(0.6, 0.99)
    with pytest.raises(RuntimeError):
        TinyAgent("frozen_lake").check(0.3, 0.5)
    TinyAgent("frozen_lake").check(0.3, 0.97)


def test_a_turn_that_never_ends_is_cut_and_played_as_it_is():
    problem, tokenizer = load_task("frozen_lake", seed=0).eval_problems(1)[0], build_tokenizer()
    game = TinyAgent("frozen_lake").begin(problem)
    prompt = list(game.tokens)
    for _ in range(FrozenLake.max_turns):
        assert not game.is_over
        game.answer(tokenizer.encode("up" * TinyAgent.max_turn_tokens))
    assert game.is_over and game.reward == 0.0
    turns = "up" * TinyAgent.max_turn_tokens + "<eos>"
    assert tokenizer.decode(game.tokens[len(prompt) :]).count(turns) == FrozenLake.max_turns
