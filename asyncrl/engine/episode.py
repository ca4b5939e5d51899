"""Episode: one trajectory from start to end. The policy acts and the environment steps until it ends.

No environment waits for another. The policy's tokens are never tokenised again. The environment's tokens are off the
loss mask. Single-turn tasks are environments of one step.
"""

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable

import numpy as np

from asyncrl.config import Config
from asyncrl.engine.environments import Environment
from asyncrl.engine.rewards import Failed, number_of
from asyncrl.records import (
    GREEDY_GROUP,
    Completion,
    FinishReason,
    Ticket,
    Trajectory,
    check_trajectory,
    spread_columns,
)

MAX_LAST_OBSERVATION = 2000
"""Characters of it that are kept."""
_SEEDS_PER_TURN = 1 << 16  # each part of an interrupted turn needs a seed


class Episode:
    """Runs the trajectory of one ticket and member."""

    def __init__(
        self,
        config: Config,
        ticket: Ticket,
        member: int,
        *,
        environment: Environment,
        generate: Callable,
    ) -> None:
        """`generate(request_id, prompt_tokens, seed, max_tokens, prefix)` is awaited for each turn; see LLMProxy."""
        self.config = config
        self.ticket = ticket
        self.member = member
        self.environment = environment
        self.request_ids: set[str] = set()
        """Running requests: at most one, or any number of an agent."""
        self.is_aborted = False
        """True if its caller ended it."""
        self._request_numbers = itertools.count()
        self._generate = generate
        self._task: asyncio.Task | None = None
        self.tokens: list[int] = []
        self.placed_completions: list[tuple[int, Completion]] = []
        """Position of its first token, and the response, for each turn of the policy."""
        self._sampling_times = (0.0, 0.0)
        """Start and end of the newest turn, Unix seconds."""
        self.turn_times: list[tuple[float, float, float]] = []
        self.reward = 0.0
        self.reward_parts: Counter[str] = Counter()
        self.turn_rewards: list[float] = []
        self.last_observation = ""

    def abort(self) -> None:
        """End the trajectory now. While it samples, the engine's abort of `request_ids` does that."""
        if not self.is_aborted and not self.request_ids and self._task is not None:
            self._task.cancel()
        self.is_aborted = True

    async def run(self, worker: int) -> Trajectory:
        """Run to the end, also to a failure, and return the trajectory."""
        self._task = asyncio.current_task()
        started_at, failure = time.time(), ""
        try:
            finish_reason: FinishReason = "aborted" if self.is_aborted else await self.play()
        except Failed as error:
            finish_reason, failure = "failed", str(error)
        except asyncio.CancelledError:
            if not self.is_aborted:
                raise
            finish_reason = "aborted"
        trajectory = self.make_trajectory(finish_reason, failure, started_at, worker)
        check_trajectory(trajectory)
        return trajectory

    async def play(self) -> FinishReason:
        """Reset, then act and step until the environment ends or the tokens are used up."""
        finish_reason = None
        try:
            finish_reason = await self.take_turns()
            return finish_reason
        finally:
            self.environment.end(is_idle=finish_reason is not None)

    async def take_turns(self) -> FinishReason:
        prompt_tokens = await self.environment.reset()
        if len(prompt_tokens) > self.config.max_prompt_tokens:
            # an error that ended the worker would come back with the ticket, worker after worker
            raise Failed(
                f"the first observation of {self.config.task} with seed {self.ticket.environment_seed} has "
                f"{len(prompt_tokens)} tokens, --max-prompt-tokens is {self.config.max_prompt_tokens}; raise it"
            )
        self.tokens += prompt_tokens
        max_tokens = len(self.tokens) + self.config.max_response_tokens
        while True:
            completion = await self.act(max_tokens - len(self.tokens))
            if self.is_aborted:  # `generate` itself continues after an update
                return "aborted"
            step = await self.environment.step(completion)
            self.turn_times.append((*self._sampling_times, time.time()))
            self.reward = number_of(self.reward + step.reward, "the sum of rewards")
            self.reward_parts.update(step.reward_parts)
            if step.observation is not None:
                self.turn_rewards.append(step.reward)
            if step.ended or len(self.tokens) + len(step.tokens) >= max_tokens:
                self.last_observation = (step.observation or "")[:MAX_LAST_OBSERVATION]
                return completion.finish_reason if step.ended else "length"
            self.tokens += step.tokens

    async def act(self, max_tokens: int) -> Completion:
        started_at = time.time()
        max_tokens = min(max_tokens, self.config.max_turn_tokens or max_tokens)
        completion = await self.ask_policy(tuple(self.tokens), max_tokens)
        self.placed_completions.append((len(self.tokens), completion))
        self.tokens += completion.tokens
        self._sampling_times = (started_at, time.time())
        return completion

    async def ask_policy(self, tokens: tuple[int, ...], max_tokens: int) -> Completion:
        """Sample a response to these tokens, by the next seed."""
        number = next(self._request_numbers)
        request_id = f"{self.ticket.ticket_id}.{number}"
        seed = None
        if self.ticket.group_id != GREEDY_GROUP:
            seed = self.ticket.seed + number * _SEEDS_PER_TURN
        self.request_ids.add(request_id)
        try:
            # only a ticket of one turn has a prefix
            return await self._generate(request_id, tokens, seed, max_tokens, self.ticket.prefix)
        finally:
            self.request_ids.remove(request_id)

    def make_trajectory(
        self, finish_reason: FinishReason, failure: str, started_at: float, worker: int
    ) -> Trajectory:
        length, has_ended = len(self.tokens), finish_reason in ("stop", "length")
        loss_mask = np.zeros(length, dtype=bool)
        for start, completion in self.placed_completions:
            loss_mask[start : start + len(completion.tokens)] = True
        return Trajectory(
            ticket_id=self.ticket.ticket_id,
            group_id=self.ticket.group_id,
            member=self.member,
            tokens=np.array(self.tokens, dtype=np.int64),
            loss_mask=loss_mask,
            reward=self.reward if has_ended else float("nan"),
            reward_parts=dict(self.reward_parts) if has_ended else {},
            finish_reason=finish_reason,
            failure=failure,
            num_turns=len(self.placed_completions),
            started_at=started_at,
            ended_at=time.time(),
            worker=worker,
            turns=tuple(self.turn_times),
            turn_rewards=tuple(self.turn_rewards) if has_ended else (),
            last_observation=self.last_observation if has_ended else "",
            experts=self.placed_completions[-1][1].experts if self.placed_completions else None,
            # behavior_logprobs, policy_versions, …: the fields of TokenColumns
            **spread_columns(self.placed_completions, length),
        )
