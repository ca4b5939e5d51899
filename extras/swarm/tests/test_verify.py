"""Responses sampled by a plain model, and lies about them, before the Verifier of a real small policy."""

import asyncio
import itertools
import os
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from programs import wait_until
from ranks import run_ranks
from several_nodes import NODE_OF_RANK, TIMEOUT
from tiny_policy import VOCAB, brute_force_nucleus, load
from transformers import AutoModelForCausalLM, AutoTokenizer
from user_files import write_user_code

from asyncrl.cluster.cluster import Cluster, form_cluster
from asyncrl.config import Config, SwarmOptions
from asyncrl.records import EVALUATION_GROUP, GREEDY_GROUP, Ticket, Trajectory
from asyncrl.runlog.metrics import merge_nodes
from extras.swarm.verify import Verifier, allowed_distance, distance

PROMPT = (4, 5, 6)
VERSION = 3
STOP_TOKENS = range(0, VOCAB, 2)

pytestmark = pytest.mark.usefixtures("one_rank")


def make_config(model, **options):
    return Config(**{"model": model, "temperature": 0.8, "env_timeout_s": 5.0, **options})


def sample(config, num):
    """(ticket, trajectory) of `num` honest responses, right ones, by worker 5.

    They come by transformers' own forward pass one token at a time.
    """
    model = AutoModelForCausalLM.from_pretrained(config.model).eval()
    tokenizer = AutoTokenizer.from_pretrained(config.model)
    rng, pairs = np.random.default_rng(0), []
    for i in range(num):
        tokens, logprobs = list(PROMPT), [0.0] * len(PROMPT)
        for _ in range(int(rng.integers(1, 15))):
            cuts = config.top_p, config.top_k, config.min_p
            with torch.no_grad():
                logits = model(torch.tensor([tokens])).logits[0, -1]
            likeliest = int(logits.argmax())
            logits = brute_force_nucleus(logits, likeliest, config.temperature, *cuts)
            of_all = torch.log_softmax(logits, dim=-1)
            tokens.append(int(rng.choice(VOCAB, p=torch.softmax(logits.double(), dim=-1).numpy())))
            logprobs.append(float(of_all[tokens[-1]]))
        mask = np.arange(len(tokens)) >= len(PROMPT)
        versions = np.where(mask, VERSION, -1).astype(np.int32)
        size = len(tokens) - (tokens[-1] in STOP_TOKENS)
        text = tokenizer.decode(tokens[len(PROMPT) : size])
        ticket = Ticket(i, i, 0, 1, 0, PROMPT, text, None, 0, VERSION)
        columns = {
            "behavior_logprobs": np.array(logprobs, np.float32),
            "policy_versions": versions,
        }
        ending = (1.0, "stop", "", 1, 0.0, 1.0)
        trajectory = Trajectory(i, i, 0, np.array(tokens), mask, *ending, worker=5, **columns)
        pairs.append((ticket, trajectory))
    return pairs


def make_verifier(config, share=1.0, cluster=None, **options):
    """A verifier, which has a tokenizer on leaders alone."""
    config = replace(config, swarm=SwarmOptions(verify_share=share))
    cluster = cluster or Cluster()
    tokenizer = AutoTokenizer.from_pretrained(config.model) if cluster.is_leader else None
    return Verifier(config, cluster, tokenizer, stop_tokens=STOP_TOKENS, **options)


def finish_scoring(verifier, policy):
    """Return the mistakes that are known when all rewards were scored again. The verifier is closed then."""
    mistakes = []

    def is_done():
        mistakes.extend(verifier.verify([], policy, VERSION))
        return not verifier._scoring

    wait_until(is_done)
    verifier.close()
    assert not asyncio.all_tasks(verifier._loop), "the terminal would show what is pending"
    return mistakes


def exchange(t):
    """Two different generated tokens in each other's place."""
    places = np.flatnonzero(t.loss_mask)
    pair = next([i, j] for i, j in itertools.combinations(places, 2) if t.tokens[i] != t.tokens[j])
    tokens = t.tokens.copy()
    tokens[pair] = tokens[pair[::-1]]
    return {"tokens": tokens}


LIES = {
    "multiplied": lambda t: {"behavior_logprobs": t.behavior_logprobs * np.float32(0.9)},
    "made up": lambda t: {"behavior_logprobs": np.where(t.loss_mask, np.float32(-1.5), 0)},
    "not a number": lambda t: {"behavior_logprobs": np.where(t.loss_mask, np.float32("nan"), 0)},
    "tokens exchanged": exchange,
}


REWARDS = """
def large(response, answer):
    if not answer:
        raise ValueError("no answer")
    return {"right": 1e11, "short": 2.0}

async def judge(response, answer):
    return 0.0
"""


@pytest.mark.parametrize(
    ("options", "reward", "honest", "false", "line"),
    [
        ({}, None, 1.0, 0.0, "the reward of ticket {} is 1, not 0"),
        ({"top_p": 0.8}, "large", 1e11 + 2 + 1e-4, 1e11 + 1e6, "the reward of ticket {} is 1e+11, not 1.00001e+11"),
        ({"top_p": 0.9, "top_k": 20, "min_p": 0.01}, "judge", 1.0, 2.0, None),
        ({"task": "guess_number"}, None, 1.0, 2.0, None),
    ],
)  # fmt: skip
def test_honest_responses_pass_by_far_and_lies_and_what_is_too_late_are_found(
    model, tmp_path, options, reward, honest, false, line
):
    """False rewards are found later. Rounding and what cannot be scored here are no lies."""
    if reward is not None:
        options["reward"] = (f"{write_user_code(tmp_path, REWARDS)}:{reward}",)
    config = make_config(model, **options, max_tokens_per_microbatch=40)
    pairs = [pair for pair in sample(config, 18) if pair[1].num_generated > 6]
    pairs = [(ticket, replace(t, reward=honest)) for ticket, t in pairs]
    verifier, policy = make_verifier(config), load(config)
    assert verifier.verify(pairs, policy, VERSION) == []
    metrics = merge_nodes([verifier.metrics()])
    assert 0 < metrics["swarm/verify_diff_max"] < 1e-5 < allowed_distance(config, torch.float32)
    lies = dict(zip(itertools.count(), LIES.values()))
    for i, lie in lies.items():
        ticket, t = pairs[i]
        pairs[i] = ticket, replace(t, worker=i, **lie(t))
    *_, (rewarded, t), (unscored, last) = pairs
    pairs[-2:] = (
        (rewarded, replace(t, reward=false, worker=9)),
        (replace(unscored, answer=""), last),
    )
    (_, older), (_, mixed) = pairs[-4:-2]
    older.policy_versions[older.loss_mask] = VERSION - 1
    mixed.policy_versions[-1] = VERSION + 1
    mixed.behavior_logprobs[-1] = -20.0
    mistakes = verifier.verify(pairs, policy, VERSION)
    mistakes += finish_scoring(verifier, policy)
    false_rewards = [(worker, what) for worker, what in mistakes if "reward" in what]
    false_logprobs = sorted(set(mistakes) - set(false_rewards))
    assert [worker for worker, _ in false_logprobs] == list(lies)
    for worker, what in false_logprobs:
        assert f"ticket {pairs[worker][0].ticket_id} are" in what
        assert f"trainer's at version {VERSION}" in what and "are allowed" in what
    # the answer of a host that exchanged tokens may not be right any more
    false_rewards = [(worker, what) for worker, what in false_rewards if worker not in lies]
    assert false_rewards == ([] if line is None else [(9, line.format(rewarded.ticket_id))])
    metrics = merge_nodes([verifier.metrics()])
    names = "verified", "too_late", "verify_failed", "rewards_verified", "rewards_unverified"
    counts = [metrics[f"swarm/{name}"] for name in names]
    num, num_unscored = 2 * len(pairs), 1 if line else 2 * len(pairs)
    assert counts == [num - 2, 2, len(mistakes), num - num_unscored, num_unscored]


def test_a_share_of_the_responses_is_checked_which_follows_from_a_key_that_no_host_has(model):
    config = make_config(model)
    (_, response), *_ = sample(config, 1)
    responses = [replace(response, ticket_id=i) for i in range(2000)]

    def chosen(**options):
        verifier = make_verifier(config, 0.05, **options)
        return [t.ticket_id for t in responses if verifier.chooses(t)]

    assert 60 < len(chosen()) < 150
    assert chosen() != chosen() and chosen(key=b"one") == chosen(key=b"one") != chosen(key=b"other")
    verifier = make_verifier(config)
    assert verifier.chooses(response)
    assert verifier.chooses(replace(response, group_id=EVALUATION_GROUP))
    assert not verifier.chooses(replace(response, finish_reason="aborted"))
    assert not verifier.chooses(replace(response, group_id=GREEDY_GROUP))


def test_neither_one_token_lifts_the_mean_of_a_short_response_nor_do_many_hide_a_false_one():
    """More is allowed in bfloat16, and where rounding may change the nucleus."""
    assert distance(np.array([-1.0]), np.array([-1.5])) == pytest.approx(0.5 / 11)
    long = np.full(10_000, -1.0)
    false = long.copy()
    false[17] = -9.0
    assert distance(long, false) == pytest.approx(8 / 50)
    in_bfloat16 = allowed_distance(Config(), torch.bfloat16)
    assert allowed_distance(Config(), torch.float32) < in_bfloat16
    for cut in ({"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}):
        assert allowed_distance(Config(**cut), torch.float32) == in_bfloat16


def seven_with_a_lie(config):
    pairs = sample(config, 7)
    pairs[4] = pairs[4][0], replace(pairs[4][1], worker=9, **LIES["made up"](pairs[4][1]))
    return pairs


def verify_on_two_nodes(rank: int, folder: str, config: Config) -> None:
    """Body of a spawned rank, of two nodes of two: node 0 has one response and node 1 seven, then nobody any."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 4)
    cluster = form_cluster((NODE_OF_RANK[rank], "a host", {}), rank, 4, store, "gloo", TIMEOUT)
    policy = load(config)
    verifier = make_verifier(config, cluster=cluster)
    pairs = seven_with_a_lie(config)[: (1, 7)[cluster.node]] if cluster.is_leader else []
    mistakes = [verifier.verify(pairs, policy, VERSION), verifier.verify([], policy, VERSION)]
    verifier.close()
    torch.save((mistakes, verifier.largest), os.path.join(folder, f"rank_{rank}.pt"))
    dist.destroy_process_group()


def test_nodes_with_unequal_numbers_of_responses_share_them_over_their_ranks_and_leaders_know(
    model, tmp_path
):
    config = make_config(model, max_tokens_per_microbatch=30)
    assert run_ranks(verify_on_two_nodes, 4, str(tmp_path), config) == [0, 0, 0, 0]
    results = [torch.load(tmp_path / f"rank_{rank}.pt") for rank in range(4)]
    workers = [[[worker for worker, _ in mistakes] for mistakes in calls] for calls, _ in results]
    assert workers == [[[], []], [[], []], [[9], []], [[], []]]
    alone = make_verifier(config)
    alone.verify(seven_with_a_lie(config), load(config), VERSION)
    alone.close()
    assert results[2][1] == pytest.approx(alone.largest, rel=1e-4)
    assert 0 < results[0][1] < 1e-5 and results[1][1] == results[3][1] == 0
