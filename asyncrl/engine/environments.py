"""What answers the policy: a reward for tasks of one turn, a gymnasium environment for those of several.

Environments are foreign code. They run off the event loop with a timeout, and whatever they do fails only their own
trajectory.
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from asyncrl.cluster.placement import WorkerSpec, available_cores
from asyncrl.engine.reward_pool import RewardPool
from asyncrl.engine.score import Failed, brief, number_of, one_line
from asyncrl.records import Ticket
from asyncrl.tasks import prepare_environment
from asyncrl.weights.models import stop_token_ids
from data.conversation import Conversation

_MAX_OBSERVATION = 100_000  # characters: fast to tokenise, and a thousand of them may be remembered


@dataclass(frozen=True)
class Step:
    """What an environment answers to a turn of the policy."""

    tokens: list[int]
    """What stands between this turn and the next; empty at the end."""
    reward: float
    ended: bool
    reward_parts: dict[str, float] = field(default_factory=dict)


class Environment(Protocol):
    """What Episode asks of an environment. Both methods raise Failed."""

    async def reset(self) -> list[int]:
        """Begin. Returns the prompt, token ids."""
        ...

    async def step(self, tokens: list[int]) -> Step:
        """Answer a turn of the policy."""
        ...


@dataclass(frozen=True)
class Environments:
    """The source of a rollout worker's environments."""

    make_environment: Callable[[Ticket, int], Environment]
    """Makes what answers the policy in the trajectory of a ticket and member."""
    close: Callable[[], None] = lambda: None
    """Gives up all that they share, when the worker ends."""


@dataclass(eq=False)
class SingleTurn:
    """A task of one response: the prompt is the ticket's, the only step is its reward."""

    ticket: Ticket
    tokenizer: Any
    rewards: RewardPool

    async def reset(self) -> list[int]:
        return list(self.ticket.prompt_tokens)

    async def step(self, tokens: list[int]) -> Step:
        response = self.tokenizer.decode(tokens, skip_special_tokens=True)
        reward, parts = await self.rewards.score(self.ticket.answer, response)
        return Step([], reward, ended=True, reward_parts=parts)


@dataclass(eq=False)
class MultiTurn:
    """A gymnasium environment of text, called off the event loop and with a timeout.

    What it returns is checked and tokenised in the same call: a fault of its own is no fault of ours, and a long
    observation keeps nobody waiting.
    """

    pool: "EnvironmentPool"
    seed: int
    environment: Any = None

    async def reset(self) -> list[int]:
        return await call_in_thread(self._reset, timeout_s=self.pool.timeout_s)

    def _reset(self) -> list[int]:
        self.environment = self.pool.take()
        observation, _ = _items(
            self.environment.reset(seed=self.seed), "reset", "observation, info"
        )
        return self.pool.conversation.first(_text(observation))

    async def step(self, tokens: list[int]) -> Step:
        response = self.pool.tokenizer.decode(tokens, skip_special_tokens=True)
        ended_turn = tokens[-1:] == [self.pool.conversation.end_of_turn]
        step = await call_in_thread(self._step, response, ended_turn, timeout_s=self.pool.timeout_s)
        if step.ended:
            self.pool.idle.append(self.environment)
        return step

    def _step(self, response: str, ended_turn: bool) -> Step:
        names = "observation, reward, terminated, truncated, info"
        observation, reward, terminated, truncated, _ = _items(
            self.environment.step(response), "step", names
        )
        reward = number_of(reward, "the step's reward")
        if _flag(terminated, "terminated") | _flag(truncated, "truncated"):
            return Step([], reward, ended=True)  # nobody reads the last observation
        return Step(
            self.pool.conversation.reply(_text(observation), ended_turn), reward, ended=False
        )


def _items(returned: Any, method: str, names: str) -> tuple | list:
    if isinstance(returned, tuple | list) and len(returned) == names.count(",") + 1:
        return returned
    raise Failed(f"{method} returned {brief(returned)}, expected ({names})")


def _text(observation: Any) -> str:
    if not isinstance(observation, str):
        raise Failed(f"the observation is {brief(observation)}, expected a str")
    if len(observation) > _MAX_OBSERVATION:
        raise Failed(
            f"the observation has {len(observation)} characters, at most {_MAX_OBSERVATION} fit"
        )
    try:
        observation.encode()
    except UnicodeEncodeError as error:
        where = f"{observation[error.start]!r} at character {error.start}"
        raise Failed(
            f"the observation has {where}, expected text without lone surrogates"
        ) from None
    return observation


def _flag(value: Any, name: str) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise Failed(f"{name} is {brief(value)}, expected True or False")
    return bool(value)


class EnvironmentPool:
    """Environments of one kind. One that ended is used again; one that failed, hangs or was left is not."""

    def __init__(self, make: Callable[[], Any], tokenizer, timeout_s: float):
        """`make()` returns a new environment. Raises ValueError for a tokenizer that cannot hold a conversation."""
        self.tokenizer, self.timeout_s = tokenizer, timeout_s
        self.conversation = Conversation(tokenizer)
        self.idle: list = []
        """Environments for the next episodes."""
        self._make = make

    def take(self):
        """Return an environment that nobody else uses. Any thread may call it, as making one is foreign code too."""
        try:
            return self.idle.pop()
        except IndexError:
            return self._make()


def start_environments(spec: WorkerSpec, tokenizer) -> Environments:
    """The environments of a worker's task; those of one turn start processes that score."""
    config = spec.config
    if config.is_multi_turn:
        pool = EnvironmentPool(
            prepare_environment(config.task, config.task_args), tokenizer, config.env_timeout_s
        )
        return Environments(lambda ticket, member: MultiTurn(pool, ticket.environment_seed))
    title, num_processes = (
        f"rewards {spec.placement.worker}",
        max(4, min(16, available_cores() // 2)),
    )
    rewards = RewardPool(config.task, config.reward, config.env_timeout_s, num_processes, title)
    return Environments(
        lambda ticket, member: SingleTurn(ticket, tokenizer, rewards), rewards.close
    )


def turn_ends(spec: WorkerSpec, tokenizer) -> list[int]:
    """Tokens that end a turn of the policy: the model's own, and the one that ends its messages in a conversation.

    Raises ValueError for a tokenizer that cannot hold a conversation, if the task is one.
    """
    ends = stop_token_ids(spec.model_path, tokenizer)
    return (
        sorted({*ends, Conversation(tokenizer).end_of_turn}) if spec.config.is_multi_turn else ends
    )


async def call_in_thread(function: Callable, *arguments, timeout_s: float) -> Any:
    """Return the function's result, off the event loop, in a daemon thread: one that hangs stops nobody, not even at
    exit.

    Raises Failed if the function raises anything at all, or takes too long.
    """
    result: Future = Future()
    result.set_running_or_notify_cancel()  # from here on nobody can stop it, only wait no longer

    def run() -> None:
        try:
            result.set_result(function(*arguments))
        except BaseException as error:  # foreign code may raise anything
            result.set_exception(Failed(one_line(error)))

    threading.Thread(target=run, name="environment", daemon=True).start()
    try:
        async with asyncio.timeout(timeout_s):
            return await asyncio.wrap_future(result)
    except TimeoutError:
        raise Failed(f"timed out after {timeout_s:g} s") from None
