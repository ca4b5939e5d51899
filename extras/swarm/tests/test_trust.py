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
RESTART = replace(SINGLE, on_update="restart")
SEVERAL = Config(task="guess_number", max_prompt_tokens=100, max_response_tokens=100)
NEWEST = 7


def make_ticket(config, **fields):
    prompt, seed = ((), 11) if config.is_multi_turn else (PROMPT, None)
    return replace(Ticket(70, 3, 1, 1, 0, prompt, "", seed, 123, 5), **fields)


PREFIX = Completion([7, 8], np.full(2, -0.25, np.float32), np.array([3, 6], np.int32), "aborted")
CONTINUED = {"versions": (6, 7), "prefix": PREFIX}


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
        logprobs = np.concatenate(
            (prefix.behavior_logprobs, np.full(len(tokens), -0.5, np.float32))
        )
        return Completion(
            [*prefix.tokens, *tokens],
            logprobs,
            np.concatenate((prefix.policy_versions, stamps)),
            reason,
        )

    return generate


class Rewards:
    """Gives half a point, or fails where the answer says so."""

    async def score(self, answer, response):
        if answer == "fail":
            raise Failed("ValueError: " + "\ud800\n" * 1000)
        if answer == "large":
            return MAX_REWARD, {"right": -MAX_REWARD}
        return 0.5, {"right": 0.5}


class Failing:
    """An environment that fails when it is reset."""

    async def reset(self):
        raise Failed("OSError: no server")


def run(config, *turns, versions=(5,), member=1, environment=None, abort=False, **fields):
    """The trajectory of an episode in which the policy says these turns, and its ticket."""
    ticket = make_ticket(config, **fields)
    if environment is None and config.is_multi_turn:
        pool = EnvironmentPool(lambda: ENVIRONMENTS["guess_number"](), TOKENIZER, 5.0)
        environment = MultiTurn(pool, ticket.environment_seed)
    environment = environment or SingleTurn(ticket, TOKENIZER, Rewards())
    begun = replace(ticket, prefix=None) if config is RESTART else ticket
    generate = sampling(turns, versions)
    episode = Episode(config, begun, member, environment=environment, generate=generate)
    if abort:
        episode.abort()
    return asyncio.run(episode.run(0)), ticket


HONEST = {
    "stop": (SINGLE, ("1 2", "stop")),
    "length": (SINGLE, ("1 " * 20, "length")),
    "failed at length": (SINGLE, ("1 2", "stop"), {"answer": "fail"}),
    "stop with the largest reward": (SINGLE, ("1 2", "stop"), {"answer": "large"}),
    "aborted before it began": (SINGLE, {"abort": True}),
    "aborted without a token": (SINGLE, ("", "aborted")),
    "aborted in its turn": (SINGLE, ("1 2", "aborted")),
    "stop through an update": (SINGLE, ("1 2 3 4", "stop"), {"versions": (5, 6, 7)}),
    "stop of one that goes on": (SINGLE, ("1 2", "stop"), CONTINUED | {"min_version": 6}),
    "aborted as it went on": (SINGLE, ("", "aborted"), CONTINUED | {"min_version": 6}),
    "aborted before it went on": (SINGLE, {"abort": True, "prefix": PREFIX}),
    "stop of a ticket for all": (SINGLE, ("1", "stop"), {"member": 3, "num_members": 8}),
    "stop under restart": (
        RESTART,
        ("1 2", "stop"),
        {"prefix": PREFIX, "versions": (6,), "min_version": 6},
    ),
    "stop after turns": (SEVERAL, *[(str(n), "stop") for n in range(1, 21)]),
    "length after turns": (SEVERAL, *[("1", "length")] * 30, {"versions": (6,)}),
    "length in a turn": (SEVERAL, ("1 " * 200, "length")),
    "failed reset": (SEVERAL, {"environment": Failing()}),
    "aborted turns": (SEVERAL, ("1", "stop"), ("", "aborted")),
    "aborted before a turn": (SEVERAL, {"abort": True}),
}
ARRAYS = ("tokens", "loss_mask", "behavior_logprobs", "policy_versions")


def value(name, place, new):
    """One value of an array is another: at a number, or the `first` or `last` generated, or the first `given` place."""

    def lie(t):
        generated, given = np.flatnonzero(t.loss_mask), np.flatnonzero(~t.loss_mask)
        places = {"first": generated[:1], "last": generated[-1:], "given": given[:1]}
        array = getattr(t, name).copy()
        array[places.get(place, place)] = new
        return {name: array}

    return lie


def cast(name):
    return lambda t: {name: getattr(t, name).astype(np.float16)}


def repeat_last(name):
    return lambda t: {name: np.append(getattr(t, name), getattr(t, name)[-1:])}


def times(*turn):
    """The first turn is at these times after the start."""
    return lambda t: {
        "turns": (tuple(t.started_at + at for at in turn), *t.turns[1:])[: len(t.turns)]
    }


def longer(num, generated):
    """More tokens at its end, generated or not."""

    def lie(t):
        more = (4, generated, np.float32(-0.5 * generated), np.int32(5 if generated else -1))
        pairs = zip(ARRAYS, more, strict=True)
        return {name: np.append(getattr(t, name), np.repeat(new, num)) for name, new in pairs}

    return lie


LIES_OF_ALL = [
    {"ticket_id": 71},
    {"group_id": 4},
    {"member": 99},
    {"member": 0},
    *map(cast, ARRAYS),
    *map(repeat_last, ARRAYS),
    value("tokens", "last", VOCAB),
    value("tokens", "given", -1),
    value("loss_mask", "given", True),
    value("behavior_logprobs", "last", np.nan),
    value("behavior_logprobs", "last", 0.01),
    value("behavior_logprobs", "last", -1e4),
    value("behavior_logprobs", "given", -0.5),
    value("policy_versions", "given", 5),
    value("policy_versions", "first", -1),
    value("policy_versions", "first", 4),
    value("policy_versions", "last", NEWEST + 1),
    lambda t: {"num_turns": t.num_turns + 200},
    lambda t: {"turns": t.turns * 3},
    times(0.0, -60.0, 0.0),
    times(0.0, float("nan"), 0.0),
    times(60.0, 0.0, 60.0),
    {"started_at": float("nan")},
    {"ended_at": float("inf")},
    {"ended_at": 0.0},
    {"failure": "x" * 10**6},
]
"""Lies about every trajectory that they change."""
LIES_OF_ENDED = [
    {"reward": float("nan")},
    {"reward": -1e300},
    {"failure": "no"},
    {"reward_parts": {"right": float("nan")}},
    {"reward_parts": {"mean": 1.0}},
    {"reward_parts": {"x" * 10**6: 1.0}},
    {"reward_parts": dict.fromkeys(map(str, range(100)), 1.0)},
]
"""Lies about trajectories that ended well."""
LIES_OF_OTHERS = [{"reward": 1.0}, {"reward_parts": {"right": 1.0}}]
RIGHT = {"finish_reason": "stop", "reward": 1.0}
LIES = {
    "stop": [
        (value("tokens", 1, 9), "another prompt"),
        (value("loss_mask", 4, False), "not generated"),
        ({"num_turns": 2}, "2 turns, 1 of them with times, not 1 to 1"),
        ({"num_turns": 0, "turns": ()}, "0 turns"),
        (value("policy_versions", 4, 6), "versions 5 … 5, not ascending"),
        ({"finish_reason": "length"}, "cut at 3 tokens, not at 8"),
    ],
    "failed at length": [({"failure": ""}, "0 characters of failure")],
    "stop of a ticket for all": [({"member": 9}, "member 9, asked were 8 from 1 on")],
    "aborted before it began": [
        (longer(2, False), "another prompt"),
        ({"finish_reason": "failed", "failure": "no"}, "another prompt"),
    ],
    "stop after turns": [
        (lambda t: {"num_turns": 1, "turns": t.turns[:1]}, "1 turns, 1 of them with times, not 5"),
        (longer(2, False), "an end that is not after a turn"),
        ({"reward_parts": {"right": 1.0}}, "1 parts of a reward, stop"),
    ],
    "aborted without a token": [
        (
            {"finish_reason": "failed", "failure": "no", "num_turns": 0, "turns": ()},
            "a failure before the policy's turn",
        ),
    ],
    "aborted turns": [({"turns": ()}, "2 turns, 0 of them with times")],
    "aborted before a turn": [
        (longer(101, False), "101 tokens of prompt and 0 after it"),
        (RIGHT, "an end that is not after a turn"),
    ],
    "stop of one that goes on": [
        (value("tokens", 3, 9), "another beginning than the ticket's"),
        (value("behavior_logprobs", 3, -1.25), "another beginning than the ticket's"),
        (value("policy_versions", 5, 5), "versions 5 … 7, not from 6 at least to 7 at most"),
    ],
    "length": [(longer(1, True), "3 tokens of prompt and 9 after it")],
    "length after turns": [(lambda t: {"turns": t.turns[:-1]}, "an end that is not after a turn")],
    "aborted in its turn": [(RIGHT, "an end that is not after a turn")],
}
"""Lies about one kind, and words of what is found."""


@pytest.mark.parametrize("kind", HONEST)
def test_an_honest_trajectory_passes_and_each_lie_about_it_is_found(kind):
    config, *turns = HONEST[kind]
    fields = turns.pop() if isinstance(turns[-1], dict) else {}
    trajectory, ticket = run(config, *turns, **fields)
    reason = trajectory.finish_reason
    assert reason == kind.split()[0]
    codec = Codec((Finished,))
    assert codec.decode(*codec.encode(Finished([trajectory], None)))

    def mistake(lie):
        change = lie(trajectory) if callable(lie) else lie
        is_lie = any(repr(getattr(trajectory, name)) != repr(change[name]) for name in change)
        changed = replace(trajectory, **change)
        return is_lie, mistake_in(changed, ticket, config, NEWEST, VOCAB)

    for honest in ({}, {"ended_at": trajectory.ended_at - 0.5}):  # a clock was set back
        assert mistake(honest)[1] is None
    lies = LIES_OF_ALL + (LIES_OF_ENDED if reason in ("stop", "length") else LIES_OF_OTHERS)
    outcomes = [mistake(lie) for lie in lies]
    assert all(words for is_lie, words in outcomes if is_lie), outcomes
    assert sum(is_lie for is_lie, _ in outcomes) > 10
    for lie, words in LIES.get(kind, []):
        assert words in mistake(lie)[1]
