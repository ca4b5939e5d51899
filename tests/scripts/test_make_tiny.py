"""The tiny models of data/tiny, and the recipe that made them."""

import random

import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.config import Config
from data.environments import ENVIRONMENTS, FrozenLake, GuessNumber
from scripts import make_tiny
from scripts.make_tiny import RECIPES, TINY_MODELS, best_guess, best_moves, success_rate

LONGEST_PROMPT = {"frozen_lake": 6, "guess_number": 2}
LONGEST_RESPONSE = {"frozen_lake": 51, "guess_number": 18}
"""Tokens beyond the prompt of a game of one action a turn, end of turn and the environment's included."""
SHORT_WARM_UP = {"addition": (2000, 20), "frozen_lake": (100, 5), "guess_number": (100, 5)}
MAX_BYTES = 600_000
"""Size of a folder: it is in the repository."""


@pytest.fixture(scope="module", params=RECIPES)
def recipe(request):
    return RECIPES[request.param]


@pytest.fixture(scope="module", params=ENVIRONMENTS)
def actor(request):
    return RECIPES[request.param]


@pytest.fixture(scope="module")
def model(recipe):
    return AutoModelForCausalLM.from_pretrained(TINY_MODELS / recipe.name)


def random_games(recipe, num_games):
    """Games with any actions, and some that are none."""
    rng = random.Random(0)
    for index in range(num_games):
        game = recipe.begin(recipe.task.train_problem(index))
        while not game.is_over:
            action = rng.choice([*ENVIRONMENTS[recipe.name].ACTIONS, "correct"])
            game.answer([*recipe.tokenizer.encode(action), recipe.tokenizer.eos_token_id])
        yield game


def test_folders_are_whole_and_small_and_there_is_no_other():
    assert sorted(path.name for path in TINY_MODELS.iterdir()) == sorted(RECIPES)
    for name in RECIPES:
        files = {path.name: path.stat().st_size for path in (TINY_MODELS / name).iterdir()}
        needed = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
        assert needed <= files.keys()
        assert sum(files.values()) <= MAX_BYTES


def test_tokenizers_map_what_is_said_onto_tokens_and_back(recipe):
    tokenizer = recipe.tokenizer
    if recipe.name in ENVIRONMENTS:
        games = random_games(recipe, 200)
        texts = [text for game in games for text in game.actions + game.observations]
        assert all(len(tokenizer.encode(text)) == 1 for text in ENVIRONMENTS[recipe.name].ACTIONS)
        assert tokenizer.convert_tokens_to_ids("<assistant>") in tokenizer.all_special_ids
    else:
        problems = recipe.task.eval_problems(300)
        texts = [text for problem in problems for text in (problem.prompt, problem.answer)]
    assert all(tokenizer.decode(tokenizer.encode(text)) == text for text in texts)
    assert "<" not in tokenizer.decode(range(len(tokenizer)), skip_special_tokens=True)
    assert tokenizer.eos_token_id != tokenizer.pad_token_id


def test_games_have_the_few_tokens_that_are_promised(actor):
    for problem in actor.task.eval_problems(100):
        prompt = actor.task.encode_prompt(problem, actor.tokenizer)
        assert len(prompt) == LONGEST_PROMPT[actor.name]
    longest = 0
    for game in random_games(actor, 300):
        last = actor.conversation.reply(game.observations[-1], ended=True)
        if "correct" not in game.actions:
            longest = max(longest, len(game.tokens) - len(prompt) - len(last))
    assert longest == LONGEST_RESPONSE[actor.name]


def test_model_is_small_and_fits_vllm_and_its_games(recipe, model):
    response = LONGEST_RESPONSE.get(recipe.name, Config().max_sequence_tokens)
    assert model.num_parameters() <= 1_000_000
    assert model.config.max_position_embeddings >= LONGEST_PROMPT.get(recipe.name, 0) + response
    assert model.config.head_dim in (32, 64, 80, 96, 128)  # vLLM's CPU attention
    assert model.generation_config.eos_token_id == recipe.tokenizer.eos_token_id


def test_held_out_success_leaves_something_to_sharpen(recipe, model):
    problems = recipe.task.eval_problems(512)[256:]  # not those it was measured on when it was made
    low, high = recipe.sampled_window
    assert low <= success_rate(recipe, model, problems, seed=1) <= high
    assert success_rate(recipe, model, problems, greedy=True) >= recipe.min_greedy


def test_problems_are_answered_together_as_each_is_alone():
    adder = RECIPES["addition"]
    model = AutoModelForCausalLM.from_pretrained(TINY_MODELS / "addition")
    problems = adder.task.eval_problems(16)
    right = 0
    for problem in problems:
        ids = torch.tensor([adder.tokenizer.encode(problem.prompt)])
        output = model.generate(ids, do_sample=False, max_new_tokens=64)[0, ids.shape[1] :]
        right += adder.tokenizer.decode(output, skip_special_tokens=True) == problem.answer
    assert right / len(problems) == success_rate(adder, model, problems, greedy=True)


def test_the_scripted_player_wins_always_when_it_takes_the_best(actor):
    for problem in actor.task.eval_problems(200):
        game = actor.begin(problem)
        while not game.is_over:
            chances = make_tiny.player_distribution(actor.name, game.actions, game.observations)
            assert sum(chances.values()) == pytest.approx(1)
            assert list(chances) == list(ENVIRONMENTS[actor.name].ACTIONS)
            best = max(chances, key=chances.get)
            game.answer([*actor.tokenizer.encode(best), actor.tokenizer.eos_token_id])
        assert game.reward == 1


def test_best_actions_of_small_cases():
    assert best_moves("P___\n____\n____\n___G") == ["down", "right"]
    assert best_moves("____\n_O__\n__P_\nO__G") == ["down", "right"]
    # no way: all alike
    assert best_moves("____\n_O_O\n__PO\nOOOG") == ["left", "down", "right", "up"]
    assert best_guess([], []) == "16"
    assert (
        best_guess(["16", "30", "20"], [GuessNumber.HIGHER, GuessNumber.LOWER, GuessNumber.HIGHER])
        == "25"
    )
    assert best_guess(["correct"], [GuessNumber.NO_ACTION]) == "16"


def test_transcripts_imitate_the_player_at_his_own_tokens_alone(actor):
    games = make_tiny.demonstrate(actor, 20)
    first = LONGEST_PROMPT[actor.name]
    for tokens, drawn_from, length in zip(games.tokens, games.imitated, games.lengths, strict=True):
        is_player = drawn_from != make_tiny.NOT_IMITATED
        written, imitated = tokens[is_player], games.distributions[drawn_from[is_player]]
        assert is_player[length - 1] and not is_player[length:].any()
        assert (imitated.sum(-1) - 1).abs().max() < 1e-5
        assert (imitated.gather(1, written[:, None]) > 0).all()
        actions = actor.tokenizer.convert_ids_to_tokens(written[::2])
        assert set(actions) <= set(ENVIRONMENTS[actor.name].ACTIONS)
        assert (written[1::2] == actor.tokenizer.eos_token_id).all()
        assert not is_player[:first].any() and is_player[first]


def test_a_turn_that_never_ends_is_cut_and_played_as_it_is():
    lake = RECIPES["frozen_lake"]
    game = lake.begin(lake.task.eval_problems(1)[0])
    prompt = list(game.tokens)
    for _ in range(FrozenLake.max_turns):
        assert not game.is_over
        game.answer(lake.tokenizer.encode("up" * lake.max_turn_tokens))
    assert game.is_over and game.reward == 0.0
    turns = "up" * lake.max_turn_tokens + "<eos>"
    assert lake.tokenizer.decode(game.tokens[len(prompt) :]).count(turns) == FrozenLake.max_turns


def test_the_same_steps_make_the_same_weights(recipe):
    num_demonstrations, num_steps = SHORT_WARM_UP[recipe.name]
    weights = []
    for _ in range(2):
        torch.manual_seed(len(weights))  # what happened before must not matter
        model = make_tiny.untrained_model(recipe.tokenizer)
        make_tiny.warm_up(model, make_tiny.demonstrate(recipe, num_demonstrations), num_steps)
        weights.append(torch.cat([parameter.flatten() for parameter in model.parameters()]))
    assert torch.equal(*weights)


def test_a_model_outside_the_accuracy_window_is_an_error(recipe):
    text = rf"{recipe.name} .* 0\.600 sampled and 0\.990 greedy; wanted"
    with pytest.raises(RuntimeError, match=text):
        recipe.check(0.6, 0.99)
    with pytest.raises(RuntimeError):
        recipe.check(0.3, 0.5)
    recipe.check(0.3, 0.97)


@pytest.mark.study
@pytest.mark.timeout(1800)
def test_the_recipe_makes_a_model_as_good_as_the_one_that_is_stored(recipe, model):
    made = make_tiny.make(recipe)
    problems = recipe.task.eval_problems(512)
    assert abs(success_rate(recipe, made, problems) - success_rate(recipe, model, problems)) < 0.12
