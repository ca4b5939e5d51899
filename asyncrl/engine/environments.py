"""What answers the policy: an environment. That of a task of one turn gives the response's reward.

Environments are foreign code. Whatever they do fails only their own trajectory.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from asyncrl.cluster.placement import WorkerSpec, available_cores
from asyncrl.engine.reward_pool import RewardPool
from asyncrl.records import Completion, Ticket


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

    async def step(self, turn: Completion) -> Step:
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

    async def step(self, turn: Completion) -> Step:
        response = self.tokenizer.decode(turn.text_tokens)
        reward, parts = await self.rewards.score(self.ticket.answer, response)
        return Step([], reward, ended=True, reward_parts=parts)


def start_environments(spec: WorkerSpec, tokenizer) -> Environments:
    """Return the environments of a worker's task; a task of one turn starts processes that score."""
    config = spec.config
    for plugin in config.plugins:
        environments = plugin.start_environments(spec, tokenizer)
        if environments is not None:
            return environments
    title, num_processes = (
        f"rewards {spec.placement.worker}",
        max(4, min(16, available_cores() // 2)),
    )
    rewards = RewardPool(config.task, config.reward, config.env_timeout_s, num_processes, title)
    return Environments(
        lambda ticket, member: SingleTurn(ticket, tokenizer, rewards), rewards.close
    )
