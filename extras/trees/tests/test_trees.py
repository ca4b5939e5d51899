"""Sequences that begin alike are read once: as few tokens as may be, and the scores of single sequences."""

import functools
import itertools
import math
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_rows import (
    LAYOUTS,
    MOST_TOKENS,
    NUM_RANKS,
    SEQUENCES,
    UPDATES,
    check_rows,
    check_shares,
)
from plain_trainer import distinct_prefixes
from tiny_families import plain_scores
from tiny_policy import (
    change_sharing,
    load,
    make_config,
    make_sequence,
    random_tree,
    save_tiny_family,
)
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig

from asyncrl.config import Config, OptimOptions, Sharing
from asyncrl.trainer.packing import ATTENTION_BLOCK, pack
from asyncrl.trainer.splitting import distribute
from extras.trees.attention import _block_mask_maker, dense_cost, mask_function
from extras.trees.option import PLUGIN
from extras.trees.policy import reason_against
from extras.trees.tree import bundle, choose_bundles, count_tokens

BUDGETS = st.just(math.inf) | st.integers(20, 60)
dense_of_64 = functools.partial(dense_cost, hidden_size=64)


@settings(max_examples=150, deadline=None)
@given(SEQUENCES, LAYOUTS, st.sampled_from(("off", "prompt", "tree")), BUDGETS)
def test_what_may_be_read_together_is_read_once_and_seen_by_its_own_branches_alone(
    sequences, layout, sharing, budget
):
    bundles = bundle(sequences, sharing, budget)
    batch = pack(bundles, layout)
    read = check_rows(batch, bundles)
    num_all = sum(len(s.tokens) for s in sequences)
    assert count_tokens(sequences, [bundles]).tolist() == [num_all, len(read), len(set(read))]
    if layout == "one_row":
        block = ATTENTION_BLOCK if any(b.shared for b in bundles) else 1
        assert batch.input_ids.shape == (1, math.ceil(len(read) / block) * block)
    if sharing == "off":
        assert [b.sequences for b in bundles] == [(s,) for s in sequences]
    if sharing == "tree" and budget == math.inf:
        assert len(read) == len(set(read)), "each is read once"
    if sharing == "prompt" and budget == math.inf:
        heads = [b.sequences[0] for b in bundles]
        firsts = [(s.group_id, s.tokens[0]) for s in heads]
        assert len(set(firsts)) == len(firsts), "what may be read together is"
    if sharing == "prompt":
        for b in bundles:
            assert len({s.group_id for s in b.sequences}) == 1, "of one group"
            shared = zip(b.sequences[1:], b.shared, strict=True)
            assert not any(s.loss_mask[:length].any() for s, length in shared), "prompts alone"
    limit = max(budget, *(len(s.tokens) for s in sequences))
    assert max(b.num_tokens for b in bundles) <= limit
    for first, second in itertools.combinations(bundles, 2):
        both = [*first.sequences, *second.sequences]
        begins_alike = both[0].tokens[0] == both[-1].tokens[0]
        if sharing == "tree" and begins_alike:
            assert len(distinct_prefixes(both)) > limit, "what fits together is read together"


@settings(max_examples=80, deadline=None)
@given(UPDATES, NUM_RANKS, MOST_TOKENS, LAYOUTS, st.sampled_from(get_args(Sharing)))
def test_bundles_are_dealt_to_ranks_as_sequences_are(updates, ranks, budget, layout, sharing):
    cost = sum if layout == "one_row" else dense_of_64
    limits = {"max_tokens": budget, "share_prefix": sharing, "cost": cost}
    split_over_ranks = functools.partial(choose_bundles, **limits)
    check_shares(
        distribute(updates, ranks, budget, layout, split_over_ranks), updates, budget, layout
    )


@pytest.mark.parametrize(
    ("sharing", "cost", "ranks", "prompt", "response", "sizes"),
    [
        # groups are cut only as far as the ranks ask
        ("prompt", sum, 1, 10, 5, [8, 8]),
        ("prompt", sum, 4, 10, 5, [4]),
        # a dense mask costs less for single sequences of long responses
        ("prompt", dense_of_64, 1, 16, 256, [1] * 16),
        # one row of all is wider than two
        ("auto", dense_of_64, 1, 128, 32, [8, 8]),
        ("auto", sum, 1, 128, 32, [16]),
        # a shared prompt saves 6 % of 16 responses of 256 tokens, and 19 % of 16 of 64
        ("auto", sum, 1, 16, 256, [1] * 16),
        ("auto", sum, 1, 16, 64, [16]),
    ],
)
def test_groups_are_read_together_as_far_as_it_costs_less(
    sharing, cost, ranks, prompt, response, sizes
):
    """`auto` shares what saves a tenth, and else deals as off does. All groups have one prompt."""
    rng, groups = np.random.default_rng(0), []
    for number in range(16):
        tokens = np.repeat([0, 1 + number], [prompt, response])
        groups.append(make_sequence(rng, tokens, tokens > 0, group_id=number // 8))
    deal = choose_bundles(groups, ranks, 16384, sharing, cost)
    assert [[len(b.sequences) for b in bundles] for bundles in deal] == [sizes] * ranks
    if sharing == "auto" and len(sizes) > 2:
        assert repr(deal) == repr(choose_bundles(groups, ranks, 16384, "off", cost))


# Attention


# slower, but the same mask
@pytest.mark.usefixtures("one_rank")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@torch.no_grad()
def test_flex_attention_has_the_scores_of_single_sequences_and_each_token_meets_the_head_once(
    tmp_path,
):
    path, rows = save_tiny_family("qwen3", str(tmp_path)), []
    policy = load(make_config(path, share_prefix="tree"))
    change_sharing(policy, attention_of_trees="flex_attention")
    bundles = bundle(random_tree(20, seed=5, system=0), "tree")
    sequences = [s for b in bundles for s in b.sequences]
    expected = plain_scores(AutoModelForCausalLM.from_pretrained(path), sequences)
    head = policy.module.model.lm_head
    head.register_forward_pre_hook(lambda _, inputs: rows.append(len(inputs[0])))
    with torch.compiler.set_stance("force_eager"):
        scored = policy.forward(policy.module, pack(bundles, "one_row"))
    torch.testing.assert_close(scored.logprobs, expected, rtol=1e-5, atol=1e-5)
    trained = {tuple(s.tokens[: t + 1]) for s in sequences for t in s.loss_mask.nonzero()[0]}
    assert len(bundles) == 3
    assert sum(rows) == len(trained) < len(expected)


@pytest.mark.slow
def test_the_mask_s_maker_is_compiled_once_for_all_widths(monkeypatch):
    """On a GPU. Here by dynamo alone, which makes the graphs that inductor would compile."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    make = _block_mask_maker.__wrapped__("cuda")
    for width in (256, 1280):
        until = (torch.arange(width) // 50 * 50 + 50)[None]
        make(mask_function(until), 1, None, width, width, until.device)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.usefixtures("one_rank")
def test_a_model_that_cannot_share_is_refused_in_one_line_and_auto_shares_nothing_there(
    tmp_path, capsys
):
    windowed = MistralConfig(sliding_window=64)
    for sharing in ("off", "auto"):
        PLUGIN.check(Config(share_prefix=sharing), windowed)
    line = "^--share-prefix needs full attention in every layer, m has sliding_window 64; leave the opt"
    with pytest.raises(ValueError, match=line):
        PLUGIN.check(Config(model="m", share_prefix="tree"), windowed)
    policy = load(make_config(save_tiny_family("gpt_oss", str(tmp_path)), share_prefix="auto"))
    (bundles,) = policy.split_over_ranks(random_tree(6), 1)
    assert [len(b.sequences) for b in bundles] == [1] * 6
    assert (
        capsys.readouterr().out == "--share-prefix auto is off: the model has sliding_attention\n"
    )


@pytest.mark.parametrize(
    "options, device, reason",
    [
        ({}, "cpu", None),
        ({}, "cuda", "it was timed on CPUs only"),
        ({"router_replay": True}, "cpu", "--router-replay has the experts of each response"),
        (
            {"optim": OptimOptions(seq_aux_loss_coef=0.1)},
            "cpu",
            "--optim.seq-aux-loss-coef balances",
        ),
    ],
)
def test_auto_is_the_default_and_off_where_something_excludes_it(options, device, reason):
    config = Config(**options).checked()
    actual = reason_against(config, LlamaConfig(), torch.device(device))
    assert config.share_prefix == "auto" and str(actual).startswith(str(reason))
