"""Every kind of trajectory that an honest worker sends passes, made by the real Episode; every single lie is named."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from asyncrl.config import Config
from asyncrl.engine.environments import EnvironmentPool, MultiTurn, SingleTurn
from asyncrl.engine.episode import Episode
from asyncrl.engine.score import MAX_REWARD, Failed
from asyncrl.messages import Finished
from asyncrl.records import Completion, Ticket
from asyncrl.weights.models import load_tokenizer, resolve_model
from data.environments import ENVIRONMENTS
from extras.swarm.trust import mistake_in
from extras.swarm.wire import Codec

TOKENIZER = load_tokenizer(resolve_model("tiny", "guess_number"))
VOCAB = len(TOKENIZER)
EOS = TOKENIZER.eos_token_id
PROMPT = (4, 5, 6)
SINGLE = Config(task="addition", max_prompt_tokens=40, max_response_tokens=8)
SEVERAL = Config(task="guess_number", max_prompt_tokens=100, max_response_tokens=100)
NEWEST = 7


def make_ticket(config, **fields):
    prompt, seed = ((), 11) if config.is_multi_turn else (PROMPT, None)
    return replace(Ticket(70, 3, 1, 1, 0, prompt, "", seed, 123, 5), **fields)


PREFIX = Completion(
    [7, 8], np.full(2, -0.25, np.float32), np.array([3, 6], np.int32), "aborted"
)


def sampling(turns, versions):
    """A policy that says these (words, finish reason), after what it is given.

    Its tokens are of these versions, about as many of each.
    """
    left = list(turns)

    async def generate(request_id, prompt_tokens, seed, max_tokens, prefix=None):
        text, reason = left.pop(0)
        prefix = prefix or Completion([], np.zeros(0, np.float32), np.zeros(0, np.int32), "")
        words = [token for word in text.split() for token in TOKENIZER.encode(word)]
        tokens = (words + [EOS] * (reason == "stop"))[: max_tokens - len(prefix.tokens)]
        stamps = np.sort(np.resize(np.array(versions, np.int32), len(tokens)))
        logprobs = np.concatenate((prefix.behavior_logprobs, np.full(len(tokens), -0.5, np.float32)))
        return Completion(
            [*prefix.tokens, *tokens], logprobs, np.concatenate((prefix.policy_versions, stamps)), reason
        )

    return generate


class Rewards:
    """Gives half a point, or fails where the answer says so."""

    async def score(self, answer, response):
        if answer == "fail":
            raise Failed("ValueError: no good")
        if answer == "fail at length":
            raise Failed("ValueError: " + "\ud800\n" * 1000)
        if answer == "large":
            return MAX_REWARD, {"right": -MAX_REWARD}
        return 0.5, {"right": 0.5}


class Failing:
    """An environment that fails when it is reset."""

    async def reset(self):
        raise Failed("OSError: no server")


def run(config, *turns, versions=(5,), member=1, environment=None, abort=False, **fields):
    """The trajectory of an episode in which the policy says these turns, its ticket, and the options."""
    ticket = make_ticket(config, **fields)
    if environment is None and config.is_multi_turn:
        pool = EnvironmentPool(lambda: ENVIRONMENTS["guess_number"](), TOKENIZER, 5.0)
        environment = MultiTurn(pool, ticket.environment_seed)
    environment = environment or SingleTurn(ticket, TOKENIZER, Rewards())
    episode = Episode(
        config, ticket, member, environment=environment, generate=sampling(turns, versions)
    )
    if abort:
        episode.abort()
    return asyncio.run(episode.run(0)), ticket, config


HONEST = {
    "stop": lambda: run(SINGLE, ("1 2", "stop")),
    "length": lambda: run(SINGLE, ("1 " * 20, "length")),
    "failed": lambda: run(SINGLE, ("1 2", "stop"), answer="fail"),
    "failed at length": lambda: run(SINGLE, ("1 2", "stop"), answer="fail at length"),
    "stop with the largest reward": lambda: run(SINGLE, ("1 2", "stop"), answer="large"),
    "aborted before it began": lambda: run(SINGLE, abort=True),
    "aborted without a token": lambda: run(SINGLE, ("", "aborted")),
    "aborted in its turn": lambda: run(SINGLE, ("1 2", "aborted")),
    "through an update": lambda: run(SINGLE, ("1 2 3 4", "stop"), versions=(5, 6, 7)),
    "stop of one that goes on": lambda: run(
        SINGLE, ("1 2", "stop"), versions=(6, 7), prefix=PREFIX, min_version=6
    ),
    "length of one that goes on": lambda: run(
        SINGLE, ("1 " * 20, "length"), versions=(6, 7), prefix=PREFIX
    ),
    "aborted as it went on": lambda: run(
        SINGLE, ("", "aborted"), versions=(6, 7), prefix=PREFIX, min_version=6
    ),
    "aborted before it went on": lambda: run(SINGLE, abort=True, prefix=PREFIX),
    "of a ticket for all": lambda: run(SINGLE, ("1", "stop"), member=3, num_members=8),
    "stop after turns": lambda: run(SEVERAL, *[(str(n), "stop") for n in range(1, 21)]),
    "cut turns": lambda: run(SEVERAL, *[("1", "length")] * 30, versions=(6,)),
    "cut in a turn": lambda: run(SEVERAL, ("1 " * 200, "length")),
    "failed reset": lambda: run(SEVERAL, environment=Failing()),
    "aborted turns": lambda: run(SEVERAL, ("1", "stop"), ("", "aborted")),
    "aborted before a turn": lambda: run(SEVERAL, abort=True),
}


def look(trajectory, ticket, config):
    return mistake_in(trajectory, ticket, config, NEWEST, VOCAB)


@pytest.mark.parametrize("kind", HONEST)
def test_every_trajectory_of_an_honest_worker_passes(kind):
    trajectory, ticket, config = HONEST[kind]()
    expected = next(
        (reason for reason in ("stop", "length", "failed", "aborted") if kind.startswith(reason)),
        None,
    )
    assert expected is None or trajectory.finish_reason == expected
    codec = Codec((Finished,))
    assert codec.decode(*codec.encode(Finished([trajectory], None)))
    assert look(trajectory, ticket, config) is None


def changed(name, place, value):
    """A lie: one value of an array is another."""

    def lie(trajectory):
        array = getattr(trajectory, name).copy()
        array[place] = value
        return {name: array}

    return lie


def cast(name, dtype):
    return lambda trajectory: {name: getattr(trajectory, name).astype(dtype)}


def shaped(name, change):
    return lambda trajectory: {name: change(getattr(trajectory, name))}


def shorter(trajectory):
    arrays = ("tokens", "loss_mask", "behavior_logprobs", "policy_versions")
    return {name: getattr(trajectory, name)[:-1] for name in arrays}


def longer(num, generated):
    """More tokens at its end, generated or not."""

    def lie(t):
        more = {
            "tokens": 4,
            "loss_mask": generated,
            "behavior_logprobs": np.float32(-0.5 * generated),
            "policy_versions": np.int32(5 if generated else -1),
        }
        return {
            name: np.append(getattr(t, name), np.repeat(value, num)) for name, value in more.items()
        }

    return lie


def times(*turn):
    return lambda t: {"turns": (tuple(t.started_at + moment for moment in turn),)}


LIES = {
    "stop": [
        ({"ticket_id": 71}, "ticket 71 of group 3, asked were 70 and 3"),
        ({"group_id": 4}, "ticket 70 of group 4"),
        ({"member": 0}, "member 0, asked were 1 from 1 on"),
        (cast("tokens", np.int32), "tokens of int32"),
        (cast("loss_mask", np.int32), "loss_mask of int32"),
        (cast("behavior_logprobs", np.float64), "behavior_logprobs of float64"),
        (cast("policy_versions", np.int64), "policy_versions of int64"),
        (shaped("policy_versions", lambda a: a[:-1]), "policy_versions of int32 (5,) for 6 tokens"),
        (shaped("tokens", lambda a: a.sum()[()].reshape(())), "tokens of int64 ()"),
        (changed("tokens", 4, VOCAB), f"tokens from 1 to {VOCAB}, not in 0 … {VOCAB - 1}"),
        (changed("tokens", 4, -1), "tokens from -1"),
        (changed("tokens", 1, 9), "another prompt"),
        (changed("loss_mask", 2, True), "another prompt"),
        (changed("loss_mask", 3, False), "another prompt"),
        (changed("loss_mask", slice(None), False), "another prompt"),
        (changed("loss_mask", 4, False), "not generated"),
        ({"num_turns": 2}, "2 turns, 1 of them with times, not 1 to 1"),
        ({"num_turns": 0, "turns": ()}, "0 turns"),
        (changed("behavior_logprobs", 4, np.nan), "log-probs that are nan"),
        (changed("behavior_logprobs", 4, 0.01), "at most 0.01"),
        (changed("behavior_logprobs", 4, -80.0), "log-probs that are -81 nats"),
        (changed("behavior_logprobs", 0, -0.5), "a log-prob of a token that is not generated"),
        (changed("policy_versions", 0, 5), "a version of a token that is not generated"),
        (changed("policy_versions", 3, -1), "versions -1 … 5"),
        (changed("policy_versions", 3, 4), "versions 4 … 5, not ascending from 5"),
        (changed("policy_versions", 5, 8), "to 7 at most"),
        (changed("policy_versions", 4, 6), "versions 5 … 5, not ascending"),
        ({"finish_reason": "length"}, "cut at 3 tokens, not at 8"),
        ({"reward": float("nan")}, "a reward of nan, stop"),
        ({"reward": -1e300}, "a reward of -1e+300"),
        ({"reward_parts": {"right": float("nan")}}, "1 parts of a reward, stop"),
        ({"reward_parts": {"right": 1e300}}, "1 parts of a reward, stop"),
        ({"reward_parts": {"mean": 1.0}}, "1 parts of a reward, stop"),
        ({"reward_parts": {"x" * 10**6: 1.0}}, "1 parts of a reward, stop"),
        ({"reward_parts": dict.fromkeys(map(str, range(100)), 1.0)}, "100 parts of a reward, stop"),
        ({"failure": "no"}, "2 characters of failure, stop"),
        ({"started_at": float("nan")}, "a time of"),
        ({"ended_at": float("inf")}, "a time of inf"),
        ({"ended_at": 0.0}, "a time of 0 after"),
        (times(0.0, -60.0, 0.0), "a time of"),
        (times(0.0, float("nan"), 0.0), "a time of nan"),
    ],
    "of a ticket for all": [({"member": 9}, "member 9, asked were 8 from 1 on")],
    "aborted before it began": [
        (longer(2, False), "another prompt"),
        ({"finish_reason": "failed", "failure": "no"}, "another prompt"),
    ],
    "stop after turns": [
        (changed("loss_mask", 0, True), "0 tokens of prompt"),
        ({"num_turns": 1}, "1 turns"),
        (lambda t: {"turns": t.turns * 2}, "turns, "),
        (longer(2, False), "an end that is not after a turn"),
        ({"reward_parts": {"right": 1.0}}, "1 parts of a reward, stop"),
    ],
    "aborted before a turn": [
        (longer(101, False), "101 tokens of prompt and 0 after it"),
        ({"finish_reason": "stop", "reward": 1.0}, "an end that is not after a turn"),
    ],
    "stop of one that goes on": [
        (changed("tokens", 3, 9), "another beginning than the ticket's"),
        (changed("behavior_logprobs", 3, -1.25), "another beginning than the ticket's"),
        (changed("policy_versions", 3, 4), "another beginning than the ticket's"),
        (changed("policy_versions", 5, 5), "versions 5 … 7, not ascending from 6 at least to 7"),
        (lambda t: {"loss_mask": np.arange(24) >= 8}, "loss_mask of bool (24,) for 8 tokens"),
    ],
    "length": [(longer(1, True), "3 tokens of prompt and 9 after it")],
    "cut turns": [(lambda t: {"turns": t.turns[:-1]}, "an end that is not after a turn")],
    "aborted in its turn": [
        ({"finish_reason": "stop", "reward": 1.0}, "an end that is not after a turn"),
        ({"reward": 1.0}, "a reward of 1, aborted"),
    ],
    "failed": [
        ({"reward": 1.0}, "a reward of 1, failed"),
        ({"reward_parts": {"right": 1.0}}, "1 parts of a reward, failed"),
        ({"failure": ""}, "0 characters of failure, failed"),
        ({"failure": "x" * 10**6}, "1000000 characters of failure"),
    ],
}
"""Of each kind, lies about it and words of what is found."""


@pytest.mark.parametrize(
    ("kind", "lie", "words"), [(kind, *row) for kind, rows in LIES.items() for row in rows]
)
def test_every_single_lie_is_named(kind, lie, words):
    trajectory, ticket, config = HONEST[kind]()
    lying = replace(trajectory, **(lie(trajectory) if callable(lie) else lie))
    assert words in (look(lying, ticket, config) or "nothing")


@pytest.mark.parametrize("change", [shorter, lambda t: {"ended_at": t.ended_at - 0.5}])
def test_a_response_cut_short_and_a_clock_that_is_set_back_a_little_pass(change):
    """Which tokens end a turn is not looked at."""
    trajectory, ticket, config = HONEST["stop"]()
    assert look(replace(trajectory, **change(trajectory)), ticket, config) is None


def test_under_restart_one_may_begin_anew_with_the_versions_that_were_asked_for():
    restart = replace(SINGLE, on_update="restart")
    ticket = make_ticket(restart, prefix=PREFIX, min_version=6)
    for version, is_honest in ((6, True), (5, False)):
        trajectory, *_ = run(restart, ("1 2", "stop"), versions=(version,))
        assert (look(trajectory, ticket, restart) is None) == is_honest
