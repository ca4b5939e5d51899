"""The tiny models of data/tiny, and the recipe that made them."""

import functools
import random

import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.config import Config
from data.environments import ENVIRONMENTS
from scripts import make_tiny
from scripts.make_tiny import RECIPES, TINY_MODELS, best_moves, success_rate

LONGEST_PROMPT = {"frozen_lake": 6, "guess_number": 2}
LONGEST_RESPONSE = {"frozen_lake": 51, "guess_number": 18}
"""Tokens beyond the prompt of a game of one action a turn, end of turn and the environment's included."""
MAX_BYTES = 600_000
"""Size of a folder: it is in the repository."""


@pytest.fixture(scope="module", params=RECIPES)
def recipe(request):
    return RECIPES[request.param]


@pytest.fixture(scope="module")
def model(recipe):
    return AutoModelForCausalLM.from_pretrained(TINY_MODELS / recipe.name)


@functools.cache
def random_games(name, num_games=200):
    """Games with any actions, and some that are none."""
    rng = random.Random(0)
    recipe, games = RECIPES[name], []
    for index in range(num_games):
        game = recipe.begin(recipe.task.train_problem(index))
        while not game.is_over:
            action = rng.choice([*ENVIRONMENTS[name].ACTIONS, "correct"])
            game.answer([*recipe.tokenizer.encode(action), recipe.tokenizer.eos_token_id])
        games.append(game)
    return games


def test_folders_are_whole_and_small_and_models_fit_vllm_and_their_games(recipe, model):
    assert sorted(path.name for path in TINY_MODELS.iterdir()) == sorted(RECIPES)
    files = {path.name: path.stat().st_size for path in (TINY_MODELS / recipe.name).iterdir()}
    needed = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    assert needed <= files.keys() and sum(files.values()) <= MAX_BYTES
    response = LONGEST_RESPONSE.get(recipe.name, Config().max_sequence_tokens)
    assert model.num_parameters() <= 1_000_000
    assert model.config.max_position_embeddings >= LONGEST_PROMPT.get(recipe.name, 0) + response
    assert model.config.head_dim in (32, 64, 80, 96, 128)  # vLLM's CPU attention
    assert model.generation_config.eos_token_id == recipe.tokenizer.eos_token_id


def test_tokenizers_map_what_is_said_onto_tokens_and_back(recipe):
    tokenizer = recipe.tokenizer
    if recipe.name in ENVIRONMENTS:
        games = random_games(recipe.name)
        texts = [text for game in games for text in game.actions + game.observations]
        assert all(len(tokenizer.encode(text)) == 1 for text in ENVIRONMENTS[recipe.name].ACTIONS)
        assert tokenizer.convert_tokens_to_ids("<assistant>") in tokenizer.all_special_ids
    else:
        problems = recipe.task.eval_problems(300)
        texts = [text for problem in problems for text in (problem.prompt, problem.answer)]
    assert all(tokenizer.decode(tokenizer.encode(text)) == text for text in texts)
    assert "<" not in tokenizer.decode(range(len(tokenizer)), skip_special_tokens=True)
    assert tokenizer.eos_token_id != tokenizer.pad_token_id


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_games_have_the_few_tokens_that_are_promised(name):
    recipe = RECIPES[name]
    prompts = {len(recipe.begin(problem).tokens) for problem in recipe.task.eval_problems(100)}
    assert prompts == {LONGEST_PROMPT[name]}
    lengths = set()
    for game in random_games(name):
        last = recipe.conversation.reply(game.observations[-1], ended=True)
        if "correct" not in game.actions:
            lengths.add(len(game.tokens) - LONGEST_PROMPT[name] - len(last))
    assert max(lengths) == LONGEST_RESPONSE[name]
    # A turn that never ends is cut and played as it is.
    game = recipe.begin(recipe.task.eval_problems(1)[0])
    turn = recipe.tokenizer.encode(ENVIRONMENTS[name].ACTIONS[-1]) * 4
    while not game.is_over:
        before = len(game.tokens)
        game.answer(turn)
        assert game.tokens[before:][: len(turn) + 1] == [*turn, recipe.tokenizer.eos_token_id]
    assert len(game.actions) == ENVIRONMENTS[name].max_turns and game.reward == 0.0


def test_held_out_success_leaves_something_to_sharpen(recipe, model):
    problems = recipe.task.eval_problems(512)[256:]  # not those it was measured on when it was made
    sampled = success_rate(recipe, model, problems, seed=1)
    greedy = success_rate(recipe, model, problems, greedy=True)
    recipe.check(sampled, greedy)
    for wrong in ((sampled, 0.5), (0.6, greedy), (0.1, greedy)):
        with pytest.raises(RuntimeError, match=rf"{recipe.name} .*{wrong[0]:.3f} sampled and"):
            recipe.check(*wrong)


def test_the_scripted_player_wins_always_when_it_takes_the_best(recipe):
    for problem in recipe.task.eval_problems(100):
        game = recipe.begin(problem)
        while not game.is_over:
            drawn, imitated = game.play(random.Random(0))
            for token, distribution in zip(drawn, imitated, strict=True):
                assert sum(chance for _, chance in distribution) == pytest.approx(1)
                assert dict(distribution)[token] > 0
            game.answer([max(chances, key=lambda pair: pair[1])[0] for chances in imitated])
        assert game.reward == 1


def test_best_moves_of_small_maps():
    assert best_moves("P___\n____\n____\n___G") == ["down", "right"]
    assert best_moves("____\n_O__\n__P_\nO__G") == ["down", "right"]
    # There is no way: all moves are alike.
    assert best_moves("____\n_O_O\n__PO\nOOOG") == ["left", "down", "right", "up"]


def test_the_player_is_imitated_at_his_own_tokens_alone_and_the_same_steps_make_the_same_weights(
    recipe,
):
    games, distributions = make_tiny.demonstrate(recipe, 200)
    for tokens, drawn_from in games:
        is_player = drawn_from != make_tiny.NOT_IMITATED
        written, imitated = tokens[is_player], distributions[drawn_from[is_player]]
        assert is_player[-1] and not is_player[0]
        assert (imitated.sum(-1) - 1).abs().max() < 1e-5
        assert (imitated.gather(1, written[:, None]) > 0).all()
    batches = make_tiny.batches_of(games)
    assert [game for batch in batches for game in batch] == games
    sizes = [len(batch) * max(len(tokens) for tokens, _ in batch) for batch in batches]
    assert max(sizes) <= make_tiny.TOKENS_PER_STEP < 2 * min(sizes[:-1])
    model = make_tiny.untrained_model(recipe.tokenizer)
    # Against each game alone, without padding.
    losses, counts = [], []
    for tokens, drawn_from in batches[0]:
        is_player = drawn_from[1:] != make_tiny.NOT_IMITATED
        log_probs = model(tokens[None, :-1]).logits[0].log_softmax(-1)[is_player]
        losses.append(-(distributions[drawn_from[1:][is_player]] * log_probs).sum())
        counts.append(int(is_player.sum()))
    loss = make_tiny.imitation_loss(model, batches[0], distributions)
    torch.testing.assert_close(loss, sum(losses) / sum(counts))
    weights = []
    for seed in range(2):
        torch.manual_seed(seed)  # what happened before must not matter
        model = make_tiny.untrained_model(recipe.tokenizer)
        make_tiny.warm_up(model, *make_tiny.demonstrate(recipe, 200), 10)
        weights.append(torch.cat([parameter.flatten() for parameter in model.parameters()]))
    assert torch.equal(*weights)
    assert make_tiny.imitation_loss(model, batches[0], distributions) < loss


@pytest.mark.study
@pytest.mark.timeout(1800)
def test_the_recipe_makes_a_model_as_good_as_the_one_that_is_stored(recipe, model):
    made = make_tiny.make(recipe)
    problems = recipe.task.eval_problems(512)
    assert abs(success_rate(recipe, made, problems) - success_rate(recipe, model, problems)) < 0.12
