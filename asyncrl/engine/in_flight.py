"""The progress of an engine's responses, read while the engine continues to sample."""

import asyncio

from asyncrl.engine.completion import Request, read_completion
from asyncrl.engine.episode import Episode
from asyncrl.engine.proxy import LLMProxy, engine_ids_of
from asyncrl.engine.vllm_setup import num_sampled, output_so_far, request_states
from asyncrl.messages import InFlight
from asyncrl.records import Completion

SETTLING_TURNS = 100
"""Limit of turns of the event loop until callers have the engine's outputs. A few turns are enough."""


async def settle(proxy: LLMProxy) -> None:
    """Wait until callers have the responses that have just ended in the engine."""
    for _ in range(SETTLING_TURNS):
        engine_ids = engine_ids_of(proxy.requests.values())
        if all(request_states(proxy.engine, engine_id) for engine_id in engine_ids):
            return
        await asyncio.sleep(0)


def read_in_flight(proxy: LLMProxy, episodes: dict[int, list[Episode]]) -> InFlight:
    """Return the progress of the trajectories of training tickets.

    A single-turn response can be continued. The tokens of other responses will be lost, and are only counted.
    """
    partials, lost = {}, {}
    for ticket_id, ticket_episodes in episodes.items():
        first = ticket_episodes[0]
        if first.ticket.is_evaluation:
            continue
        if proxy.config.is_multi_turn or len(ticket_episodes) > 1:
            lost[ticket_id] = _count_sampled(proxy, ticket_episodes)
            continue
        completion = _read_response(proxy, first)
        if completion is not None and completion.tokens:
            partials[ticket_id] = completion
    return InFlight(partials, lost)


def _read_response(proxy: LLMProxy, episode: Episode) -> Completion | None:
    """Return the only turn's response: whole if only its reward is missing, otherwise the tokens so far."""
    if episode.placed_completions:
        return episode.placed_completions[0][1]
    request = next(filter(None, map(proxy.requests.get, episode.request_ids)), None)
    if request is None:
        return None
    outputs = map(output_so_far, request_states(proxy.engine, request.engine_id))
    num_top = proxy.config.top_logprobs
    parts = [*request.parts, *(read_completion(output, num_top) for output in outputs)]
    return Request(parts=parts).end("interrupted")


def _count_sampled(proxy: LLMProxy, episodes: list[Episode]) -> int:
    """Count the tokens of a ticket's trajectories: of ended turns, and of running requests."""
    completions = [
        completion for episode in episodes for _, completion in episode.placed_completions
    ]
    num_tokens = sum(len(completion.tokens) for completion in completions)
    for request in map(proxy.requests.get, set().union(*(e.request_ids for e in episodes))):
        if request is not None:
            num_tokens += len(request.tokens) + num_sampled(proxy.engine, request.engine_id)
    return num_tokens
