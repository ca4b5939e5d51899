"""One trajectory from start to end: `EnvManager` resets an environment, lets the policy act and steps it until it ends.

Every environment is on its own: none waits for another unless a barrier is asked for. Tokens go in and come out: what
the policy wrote is never tokenised again, and the environment's tokens are off the loss mask. Single-turn tasks are
environments of one step.
"""

import asyncio
import functools
import math
import queue
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from config import Config
from data.conversation import Conversation
from data.latency import LatencyLaw
from data.records import FinishReason, Ticket, Trajectory, check_trajectory
from data.rewards import RewardError, RewardPool, brief, one_line
from engine.proxy import Completion

_MAX_OBSERVATION = 100_000  # characters: fast to tokenise, and a thousand of them may be remembered
_SEEDS_PER_TURN = 1 << 16  # a turn that is interrupted takes several


class EnvironmentFailed(Exception):
    """An environment or reward raised, hung, died or gave what it must not; the message is one line."""


@dataclass(frozen=True)
class Step:
    """What an environment answers to a turn of the policy."""

    tokens: list[int]
    """What stands between this turn and the next; empty at the end."""
    reward: float
    ended: bool


class Environment(Protocol):
    """What EnvManager asks of an environment. Both methods raise EnvironmentFailed."""

    async def reset(self) -> list[int]:
        """Begin. Returns the prompt, token ids."""
        ...

    async def step(self, tokens: list[int]) -> Step:
        """Answer a turn of the policy."""
        ...


class SingleTurn:
    """A task of one response: the prompt is the ticket's, the only step is its reward."""

    def __init__(self, ticket: Ticket, tokenizer, rewards: RewardPool):
        self.ticket, self.tokenizer, self.rewards = ticket, tokenizer, rewards

    async def reset(self) -> list[int]:
        return list(self.ticket.prompt_tokens)

    async def step(self, tokens: list[int]) -> Step:
        response = self.tokenizer.decode(tokens, skip_special_tokens=True)
        try:
            return Step([], await self.rewards.score(self.ticket.answer, response), ended=True)
        except RewardError as error:
            raise EnvironmentFailed(str(error)) from None


class MultiTurn:
    """A gymnasium environment of text, called off the event loop and with a timeout.

    What it returns is checked and tokenised in the same call: a fault of its own is no fault of ours, and a long
    observation keeps nobody waiting.
    """

    def __init__(self, pool: "EnvironmentPool", seed: int):
        self.pool, self.seed = pool, seed
        self.environment: Any = None

    async def reset(self) -> list[int]:
        return await self.pool.threads.call(self._reset, timeout_s=self.pool.timeout_s)

    def _reset(self) -> list[int]:
        self.environment = self.pool.take()
        observation, _ = _items(self.environment.reset(seed=self.seed), "reset", "observation, info")
        return self.pool.conversation.first(_text(observation))

    async def step(self, tokens: list[int]) -> Step:
        response = self.pool.tokenizer.decode(tokens, skip_special_tokens=True)
        ended_turn = tokens[-1:] == [self.pool.conversation.end_of_turn]
        step = await self.pool.threads.call(self._step, response, ended_turn, timeout_s=self.pool.timeout_s)
        if step.ended:
            self.pool.give_back(self.environment)
        return step

    def _step(self, response: str, ended_turn: bool) -> Step:
        names = "observation, reward, terminated, truncated, info"
        observation, reward, terminated, truncated, _ = _items(self.environment.step(response), "step", names)
        reward = _finite(reward)
        if _flag(terminated, "terminated") | _flag(truncated, "truncated"):
            return Step([], reward, ended=True)  # nobody reads the last observation
        return Step(self.pool.conversation.reply(_text(observation), ended_turn), reward, ended=False)


def _items(returned: Any, method: str, names: str) -> tuple | list:
    if isinstance(returned, tuple | list) and len(returned) == names.count(",") + 1:
        return returned
    raise EnvironmentFailed(f"{method} returned {brief(returned)}, expected ({names})")


def _text(observation: Any) -> str:
    if not isinstance(observation, str):
        raise EnvironmentFailed(f"the observation is {brief(observation)}, expected a str")
    if len(observation) > _MAX_OBSERVATION:
        raise EnvironmentFailed(f"the observation has {len(observation)} characters, at most {_MAX_OBSERVATION} fit")
    try:
        observation.encode()
    except UnicodeEncodeError as error:
        where = f"{observation[error.start]!r} at character {error.start}"
        raise EnvironmentFailed(f"the observation has {where}, expected text without lone surrogates") from None
    return observation


def _finite(reward: Any) -> float:
    try:
        is_number = getattr(reward, "ndim", 0) == 0 and math.isfinite(reward)
    except (TypeError, OverflowError):
        is_number = False
    if not is_number:
        raise EnvironmentFailed(f"the reward is {brief(reward)}, expected one finite number")
    return float(reward)


def _flag(value: Any, name: str) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise EnvironmentFailed(f"{name} is {brief(value)}, expected True or False")
    return bool(value)


class EnvironmentPool:
    """Environments of one kind. One that ended is used again; one that failed, hangs or was left is not."""

    def __init__(self, make: Callable[[], Any], tokenizer, timeout_s: float):
        """`make()` gives a new environment. Raises ValueError for a tokenizer that cannot hold a conversation."""
        self.tokenizer, self.timeout_s = tokenizer, timeout_s
        self.conversation = Conversation(tokenizer)
        self.threads = CallThreads("environment")
        self._make = make
        self._idle: list = []

    def take(self):
        """An environment that nobody else uses; may be called in any thread, as making one is foreign code too."""
        try:
            return self._idle.pop()
        except IndexError:
            return self._make()

    def give_back(self, environment) -> None:
        """Leave an environment to the next episode."""
        self._idle.append(environment)


class Delayed:
    """An environment with simulated latency before each step, for studies."""

    def __init__(self, environment: Environment, law: LatencyLaw, scale: float, timeout_s: float, seed: int):
        self.environment, self.law, self.scale, self.timeout_s = environment, law, scale, timeout_s
        self._random = random.Random(seed)

    async def reset(self) -> list[int]:
        return await self.environment.reset()

    async def step(self, tokens: list[int]) -> Step:
        delay = self.law.draw(self._random)
        seconds = delay.seconds * self.scale
        if delay.failure == "crash":
            raise EnvironmentFailed("simulated crash")
        if delay.failure == "hang" or seconds > self.timeout_s:
            await asyncio.sleep(self.timeout_s)
            raise EnvironmentFailed(f"simulated latency: timed out after {self.timeout_s:g} s")
        await asyncio.sleep(seconds)
        return await self.environment.step(tokens)


class CallThreads:
    """Calls functions off the event loop, each in a daemon thread that nobody else uses meanwhile.

    A thread is used again after its call; one that hangs is left behind and stops nobody, not even at exit.
    """

    def __init__(self, name: str):
        self.name = name
        self._idle: list[queue.SimpleQueue] = []  # inboxes of threads

    def __len__(self) -> int:
        """Threads that wait for a call."""
        return len(self._idle)

    async def call(self, function: Callable, *arguments, timeout_s: float) -> Any:
        """The function's result. Raises EnvironmentFailed if it raises anything at all, or takes too long."""
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        inbox = self._idle.pop() if self._idle else self._start()
        inbox.put((loop, future, functools.partial(function, *arguments)))
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError:
            raise EnvironmentFailed(f"timed out after {timeout_s:g} s") from None

    def _start(self) -> queue.SimpleQueue:
        inbox: queue.SimpleQueue = queue.SimpleQueue()
        threading.Thread(target=self._serve, args=(inbox,), name=self.name, daemon=True).start()
        return inbox

    def _serve(self, inbox: queue.SimpleQueue) -> None:
        while True:
            loop, future, call = inbox.get()
            try:
                result, error = call(), None
            except EnvironmentFailed as failed:
                result, error = None, failed
            except BaseException as raised:  # foreign code may raise anything, and this thread must go on
                result, error = None, EnvironmentFailed(one_line(raised))
            if loop.is_closed():
                return
            loop.call_soon_threadsafe(self._settle, inbox, future, result, error)

    def _settle(self, inbox: queue.SimpleQueue, future: asyncio.Future, result, error: Exception | None) -> None:
        self._idle.append(inbox)
        if future.done():
            return  # too late
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)


class EnvManager:
    """Runs the trajectory of one ticket and member."""

    def __init__(
        self,
        config: Config,
        ticket: Ticket,
        member: int,
        environment: Environment,
        generate: Callable,
        wait_before_turn: Callable,
        wait_before_step: Callable,
    ):
        """`generate(request_id, prompt_tokens, seed, max_tokens)` is awaited for every turn of the policy.

        `wait_before_turn()` and `wait_before_step()` are awaited too: barriers, or nothing.
        """
        self.config, self.ticket, self.member, self.environment = config, ticket, member, environment
        self.request_id: str | None = None
        """The request that is being sampled now."""
        self._generate = generate
        self._wait_before_turn, self._wait_before_step = wait_before_turn, wait_before_step
        self._task: asyncio.Task | None = None
        self._aborted = False
        self._tokens: list[int] = []
        self._turns: list[tuple[int, Completion]] = []  # position of the first token, and what was sampled
        self._times: list[tuple[float, float, float]] = []
        self._reward = 0.0

    def abort(self) -> None:
        """End the trajectory where it stands. While it samples, the engine's abort of `request_id` does that."""
        self._aborted = True
        if self.request_id is None and self._task is not None:
            self._task.cancel()

    async def run(self, worker: int) -> Trajectory:
        """Run to the end, whichever it is, and return the whole trajectory."""
        self._task = asyncio.current_task()
        started_at, failure = time.time(), ""
        try:
            finish_reason: FinishReason = "aborted" if self._aborted else await self._play()
        except EnvironmentFailed as error:
            finish_reason, failure = "failed", str(error)
        except asyncio.CancelledError:
            if not self._aborted:
                raise
            finish_reason = "aborted"
        trajectory = self._trajectory(finish_reason, failure, started_at, worker)
        check_trajectory(trajectory)
        return trajectory

    async def _play(self) -> FinishReason:
        """Reset, then act and step until the environment ends or the tokens are used up."""
        self._tokens += await self.environment.reset()
        self._check_prompt()
        max_tokens = len(self._tokens) + self.config.max_response_tokens
        while True:
            await self._wait_before_turn()
            started_at = time.time()
            completion = await self._act(max_tokens - len(self._tokens))
            sampled_at = time.time()
            if completion.finish_reason == "aborted" or self._aborted:
                return "aborted"
            await self._wait_before_step()
            step = await self.environment.step(completion.tokens)
            self._times.append((started_at, sampled_at, time.time()))
            self._reward += step.reward
            if step.ended:
                return completion.finish_reason
            if len(self._tokens) + len(step.tokens) >= max_tokens:
                return "length"
            self._tokens += step.tokens

    def _check_prompt(self) -> None:
        if len(self._tokens) > self.config.max_prompt_tokens:
            raise ValueError(
                f"the first observation of {self.config.task} with seed {self.ticket.environment_seed} has "
                f"{len(self._tokens)} tokens, --max-prompt-tokens is {self.config.max_prompt_tokens}; raise it"
            )

    async def _act(self, max_tokens: int) -> Completion:
        """One turn of the policy."""
        turn = len(self._turns)
        self.request_id = f"{self.ticket.ticket_id}.{turn}"
        seed = self.ticket.seed + turn * _SEEDS_PER_TURN
        try:
            completion = await self._generate(self.request_id, tuple(self._tokens), seed, max_tokens)
        finally:
            self.request_id = None
        self._turns.append((len(self._tokens), completion))
        self._tokens += completion.tokens
        return completion

    def _trajectory(self, finish_reason: FinishReason, failure: str, started_at: float, worker: int) -> Trajectory:
        length = len(self._tokens)
        loss_mask = np.zeros(length, dtype=bool)
        behavior_logprobs = np.zeros(length, dtype=np.float32)
        policy_versions = np.full(length, -1, dtype=np.int32)
        for start, completion in self._turns:
            turn = slice(start, start + len(completion.tokens))
            loss_mask[turn] = True
            behavior_logprobs[turn] = completion.logprobs
            policy_versions[turn] = completion.versions
        return Trajectory(
            ticket_id=self.ticket.ticket_id,
            group_id=self.ticket.group_id,
            member=self.member,
            tokens=np.array(self._tokens, dtype=np.int64),
            loss_mask=loss_mask,
            behavior_logprobs=behavior_logprobs,
            policy_versions=policy_versions,
            reward=self._reward if finish_reason in ("stop", "length") else float("nan"),
            finish_reason=finish_reason,
            failure=failure,
            num_turns=len(self._turns),
            started_at=started_at,
            ended_at=time.time(),
            worker=worker,
            turns=tuple(self._times),
        )
