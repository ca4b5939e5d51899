"""Whatever trajectory an honest worker sends passes, made by the real Episode; every single lie about it is found."""

import asyncio
import pickle
import random
from collections import Counter
from dataclasses import replace

import numpy as np

from asyncrl.config import Config
from asyncrl.engine.environments import SingleTurn
from asyncrl.engine.episode import Episode
from asyncrl.engine.rewards import MAX_REWARD, Failed
from asyncrl.messages import Finished
from asyncrl.records import Completion, Ticket, join_columns
from asyncrl.weights.models import load_tokenizer, resolve_model
from data.environments import ENVIRONMENTS
from extras.environments.multi_turn import EnvironmentPool, MultiTurn
from extras.swarm.trust import find_mistake
from extras.swarm.wire import decode, encode

TOKENIZER = load_tokenizer(resolve_model("tiny", "guess_number"))
VOCAB = len(TOKENIZER)
DIGITS = TOKENIZER.convert_tokens_to_ids(list("123456789"))
SINGLE = Config(task="addition", max_prompt_tokens=40, max_response_tokens=8)
RESTART = replace(SINGLE, on_update="restart")
SEVERAL = Config(task="guess_number", max_prompt_tokens=100, max_response_tokens=100)
PREFIX = Completion(
    [7, 8],
    "interrupted",
    behavior_logprobs=np.full(2, -0.25, np.float32),
    policy_versions=np.array([3, 6], np.int32),
)
NOTHING = Completion([], "", **join_columns([]))
NEWEST = 7
ARRAYS = ("tokens", "loss_mask", "behavior_logprobs", "policy_versions")


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

    def end(self, *, is_idle):
        assert not is_idle


class RandomPolicy:
    """Says random numbers, ends, is cut or is interrupted, with weights that are `oldest` at least and may change.

    As in LLMProxy, a response is interrupted only because its episode is aborted.
    """

    def __init__(self, draw, oldest):
        self.draw, self.version = draw, draw.randint(oldest, NEWEST)
        self.episode = None

    async def generate(self, request_id, prompt_tokens, seed, max_tokens, prefix=None):
        prefix = prefix or NOTHING
        (reason,) = self.draw.choices(["stop", "length", "interrupted"], [5, 1, 2])
        if reason == "interrupted":
            self.episode.abort()
        num_words = max_tokens if reason == "length" else self.draw.choice([0, 0, 1, 3])
        tokens = self.draw.choices(DIGITS, k=num_words)
        tokens += [TOKENIZER.eos_token_id] * (reason == "stop")
        tokens = tokens[: max_tokens - len(prefix.tokens)]
        versions = np.full(len(tokens), self.version, np.int32)
        if self.draw.random() < 0.3:
            self.version = NEWEST
            versions[1:] = NEWEST
        logprobs = np.full(len(tokens), -0.5, np.float32)
        return Completion(
            [*prefix.tokens, *tokens],
            reason,
            behavior_logprobs=np.concatenate((prefix.behavior_logprobs, logprobs)),
            policy_versions=np.concatenate((prefix.policy_versions, versions)),
        )


def run(config, draw):
    """The trajectory of a random episode, and its ticket."""
    ticket = Ticket(70, 3, 1, draw.choice([1, 8]), 0, (4, 5, 6), "", None, 123, draw.choice([5, 6]))
    if config.is_multi_turn:
        ticket = replace(ticket, prompt_tokens=(), environment_seed=draw.randrange(99))
        pool = EnvironmentPool(lambda: ENVIRONMENTS["guess_number"](), TOKENIZER, 5.0)
        environment = MultiTurn(pool, ticket.environment_seed)
        environment = Failing() if draw.random() < 0.1 else environment
    else:
        answer, prefix = draw.choice(["", "fail", "large"]), draw.choice([None, PREFIX])
        ticket = replace(ticket, answer=answer, prefix=prefix)
        environment = SingleTurn(ticket, TOKENIZER, Rewards())
    begun = replace(ticket, prefix=None) if config is RESTART else ticket
    policy = RandomPolicy(draw, ticket.min_version)
    member = ticket.member + draw.randrange(ticket.num_members)
    episode = Episode(config, begun, member, environment=environment, generate=policy.generate)
    policy.episode = episode
    if draw.random() < 0.1:
        episode.abort()
    return asyncio.run(episode.run(0)), ticket


def value(name, place, new):
    """One value of an array is another: at the `first` or `last` generated, or the first `given` place."""

    def lie(t):
        generated, given = np.flatnonzero(t.loss_mask), np.flatnonzero(~t.loss_mask)
        places = {"first": generated[:1], "last": generated[-1:], "given": given[:1]}
        array = getattr(t, name).copy()
        array[places[place]] = new
        return {name: array}

    return lie


def cast(name):
    return lambda t: {name: getattr(t, name).astype(np.float16)}


def longer(num, generated):
    """More tokens at its end, generated or not."""

    def lie(t):
        more = (4, generated, np.float32(-0.5 * generated), np.int32(NEWEST if generated else -1))
        pairs = zip(ARRAYS, more, strict=True)
        return {name: np.append(getattr(t, name), np.repeat(new, num)) for name, new in pairs}

    return lie


def as_given(t):
    """The last generated token as if it had been given."""
    changes = {"loss_mask": False, "behavior_logprobs": 0.0, "policy_versions": -1}
    return {name: value(name, "last", new)(t)[name] for name, new in changes.items()}


LIES = {
    "all": [
        {"ticket_id": 71},
        {"group_id": 4},
        {"member": 99},
        {"member": 0},
        *map(cast, ARRAYS),
        lambda t: {"loss_mask": np.append(t.loss_mask, True)},
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
        longer(101, True),
        longer(101, False),
        lambda t: {"num_turns": t.num_turns + 200},
        lambda t: {"turns": t.turns * 3},
        lambda t: {"turns": tuple((end + 60.0, at, end) for _, at, end in t.turns)},
        {"started_at": float("nan")},
        {"ended_at": float("inf")},
        {"ended_at": 0.0},
        lambda t: {"failure": "" if t.failure else "no"},
        {"failure": "x" * 10**4},
        {"last_observation": "x" * 10**4},
        lambda t: {"segment_lengths": (len(t.tokens),)},
        lambda t: {"turn_rewards": (*t.turn_rewards, 0.0)},
    ],
    "older": [value("policy_versions", "first", NEWEST)],
    "ended": [
        as_given,
        longer(2, False),
        {"num_turns": 0, "turns": ()},
        lambda t: {"num_turns": 1, "turns": t.turns[:1]},
        lambda t: {"turns": t.turns[:-1]},
        {"reward": float("nan")},
        {"reward": -1e300},
        {"reward_parts": {"right": float("nan")}},
        {"reward_parts": {"mean": 1.0}},
        {"reward_parts": {"x" * 10**4: 1.0}},
        {"reward_parts": dict.fromkeys(map(str, range(100)), 1.0)},
    ],
    "not ended": [
        {"reward": 1.0},
        {"reward_parts": {"right": 1.0}},
        {"finish_reason": "stop", "reward": 1.0},
    ],
    "single": [{"last_observation": "x"}, longer(2, False), value("tokens", "given", 9)],
    "single not ended": [{"finish_reason": "failed", "failure": "no", "num_turns": 0, "turns": ()}],
    "single stop": [{"finish_reason": "length"}],
    "several ended": [
        {"reward_parts": {"right": 1.0}},
        lambda t: {"turn_rewards": (t.turn_rewards[0] + 1.0, *t.turn_rewards[1:])},
        {"turn_rewards": ()},
    ],
    "prefix": [
        value("tokens", "first", 9),
        value("behavior_logprobs", "first", -1.25),
        lambda t: {"policy_versions": np.where(t.loss_mask, NEWEST, -1).astype(np.int32)},
    ],
}
"""Lies by what they are about."""


def kinds_of(trajectory, ticket, config):
    """Keys of LIES."""
    reason, size = trajectory.finish_reason, "several" if config.is_multi_turn else "single"
    ending = "ended" if reason in ("stop", "length") else "not ended"
    yield from ("all", ending, size, f"{size} {ending}")
    is_full = trajectory.num_generated == config.max_response_tokens
    yield f"{size} {reason}{' in full' * is_full}"
    if ticket.prefix is not None and config is not RESTART:
        yield "prefix"
    if trajectory.num_generated > 1 and trajectory.policy_versions.max() < NEWEST:
        yield "older"


def test_honest_trajectories_pass_and_each_lie_about_them_is_found():
    draw, seen = random.Random(0), Counter()
    for _ in range(120):
        config = draw.choice([SINGLE, RESTART, SEVERAL])
        trajectory, ticket = run(config, draw)
        plain = pickle.dumps(trajectory)
        assert decode(*encode(Finished([trajectory], None)), [Finished])
        for honest in ({}, {"ended_at": trajectory.ended_at - 0.5}):  # a clock was set back
            changed = replace(trajectory, **honest)
            assert find_mistake(changed, ticket, config, NEWEST, VOCAB) is None
        for kind in kinds_of(trajectory, ticket, config):
            for number, lie in enumerate(LIES.get(kind, ())):
                change = lie(trajectory) if callable(lie) else lie
                changed = replace(trajectory, **change)
                is_lie = pickle.dumps(changed) != plain
                mistake = find_mistake(changed, ticket, config, NEWEST, VOCAB)
                assert mistake or not is_lie, (kind, number, trajectory, ticket)
                seen[kind, number] += is_lie
    assert len(seen) == sum(map(len, LIES.values())) and min(seen.values()) > 1
