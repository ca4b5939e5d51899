"""Environments answer the policy. They are foreign code: an error in one fails only its own trajectory."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from asyncrl.cluster.placement import WorkerSpec, available_cores
from asyncrl.engine.reward_pool import RewardPool
from asyncrl.records import Completion, Ticket


@dataclass(frozen=True)
class Step:
    """The answer of an environment to a turn of the policy."""

    tokens: list[int]
    """Tokens between this turn and the next; empty at the end."""
    reward: float
    ended: bool
    reward_parts: dict[str, float] = field(default_factory=dict)
    observation: str | None = None
    """Text of an environment of several turns, for people."""


class Environment(Protocol):
    """The calls that Episode makes. The first two raise Failed."""

    async def reset(self) -> list[int]:
        """Begin. Return the token ids of the prompt."""
        ...

    async def step(self, turn: Completion) -> Step:
        """Answer a turn of the policy."""
        ...

    def end(self, *, is_idle: bool) -> None:
        """Give up the resources of the episode. `is_idle`: no call of it is running, so it can play another episode."""
        ...


@dataclass(frozen=True)
class Environments:
    """The source of a rollout worker's environments."""

    make_environment: Callable[[Ticket, int], Environment]
    """Makes the environment of a trajectory from its ticket and member."""
    close: Callable[[], None] = lambda: None
    """Ends their shared processes."""


@dataclass(eq=False)
class SingleTurn:
    """A task of one response. The ticket has the prompt, and the only step returns the reward."""

    ticket: Ticket
    tokenizer: Any
    rewards: RewardPool

    async def reset(self) -> list[int]:
        return list(self.ticket.prompt_tokens)

    async def step(self, turn: Completion) -> Step:
        response = self.tokenizer.decode(turn.text_tokens)
        reward, parts = await self.rewards.score(self.ticket.answer, response)
        return Step([], reward, ended=True, reward_parts=parts)

    def end(self, *, is_idle: bool) -> None:
        pass


def start_environments(spec: WorkerSpec, tokenizer) -> Environments:
    """Return the environments of a worker's task. For a single-turn task, start processes that score."""
    config = spec.config
    for plugin in config.plugins:
        environments = plugin.start_environments(spec, tokenizer)
        if environments is not None:
            return environments
    title = f"rewards {spec.placement.worker}"
    num_processes = max(4, min(16, available_cores() // 2))
    rewards = RewardPool(config.task, config.reward, config.env_timeout_s, num_processes, title)
    return Environments(
        lambda ticket, member: SingleTurn(ticket, tokenizer, rewards), rewards.close
    )
