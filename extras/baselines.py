"""What the papers compare with: `--scheduling batch`, `--scheduling lockstep` and `--no-replicate-prompts`.

`batch` splits groups over the workers in advance, in rounds: all responses are waited for, then all are rewarded.
`lockstep` is queue scheduling in which all environments take a turn before any takes the next. Without replicated
prompts a group is one request of group_size responses on one worker.

A barrier holds trajectories back until every running trajectory, on all workers, has come to it.
"""

import asyncio
import functools
from collections.abc import Callable

from asyncrl.engine.completion import Completion, Request
from asyncrl.engine.episode import Episode
from asyncrl.engine.proxy import LLMProxy
from asyncrl.messages import Proceed, Waiting
from asyncrl.records import Ticket
from rollout import RolloutWorker


class BaselineEpisode(Episode):
    """A trajectory that waits for all others before each turn (`lockstep`) or before each step (`batch`)."""

    wait_at_barrier: Callable
    """Awaited where the scheduling has its barrier."""

    async def act(self, max_tokens: int) -> Completion:
        """Let the policy take one turn; evaluation waits for nobody."""
        scheduling = "queue" if self.ticket.is_evaluation else self.config.scheduling
        if scheduling == "lockstep":
            await self.wait_at_barrier()
        completion = await super().act(max_tokens)
        if scheduling == "batch" and completion.finish_reason != "aborted" and not self.is_aborted:
            await self.wait_at_barrier()
        return completion


class BaselineWorker(RolloutWorker):
    """A worker whose trajectories wait at the barrier, or share the request of their group."""

    def __init__(self, *arguments):
        """Arguments as of RolloutWorker."""
        super().__init__(*arguments)
        self._opened = asyncio.Event()
        self._waiting: list[int] = []

    async def act(self, message) -> None:
        """Act on a message. The trajectories that come to the barrier after it opened wait for the next time."""
        if isinstance(message, Proceed):
            self._opened.set()
            self._opened = asyncio.Event()
        else:
            await super().act(message)

    def make_episodes(self, ticket: Ticket) -> list[Episode]:
        """Make the trajectories of a ticket: one, or those of a whole group."""
        generates = [self.proxy.generate]
        if ticket.num_members > 1:
            generates = share_request(self.proxy, ticket)
        episodes = []
        for member, generate in enumerate(generates, ticket.member):
            environment = self.environments.make_environment(ticket, member)
            episode = BaselineEpisode(self.config, ticket, member, environment=environment, generate=generate)
            episode.wait_at_barrier = functools.partial(self._wait_at_barrier, ticket.ticket_id)
            episodes.append(episode)
        return episodes

    async def _wait_at_barrier(self, ticket_id: int) -> None:
        """Wait until all tickets, on all workers, have come as far."""
        self.proxy.activity.add(at_barrier=1)
        try:
            self._flush_soon()
            self._waiting.append(ticket_id)
            await self._opened.wait()
        finally:
            self.proxy.activity.add(at_barrier=-1)

    def _flush(self) -> None:
        super()._flush()
        waiting, self._waiting = self._waiting, []
        if waiting:
            self.connection.send(Waiting(waiting))


def share_request(proxy: LLMProxy, ticket: Ticket) -> list[Callable]:
    """Return one `generate` per member; all of them wait for the same request."""

    @functools.cache
    def start() -> asyncio.Future:
        request_id = f"{ticket.ticket_id}.0"
        return asyncio.ensure_future(
            generate_group(proxy, request_id, ticket.prompt_tokens, ticket.seed, ticket.num_members)
        )

    async def generate(index: int, *_) -> Completion:
        return (await start())[index]

    return [functools.partial(generate, index) for index in range(ticket.num_members)]


async def generate_group(
    proxy: LLMProxy, request_id: str, prompt_tokens: tuple[int, ...], seed: int, num_responses: int
) -> list[Completion]:
    """Sample several responses by one request; all are returned when the last has ended."""
    request = proxy.requests[request_id] = Request()
    try:
        await proxy.until_resumed()
        request.engine_id = request_id
        max_tokens = proxy.config.max_response_tokens
        return await proxy.sample(request_id, list(prompt_tokens), seed, max_tokens, num_responses)
    finally:
        del proxy.requests[request_id]
