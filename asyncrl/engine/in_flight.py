"""What there is of the responses that an engine samples, read while it samples on."""

import asyncio

from asyncrl.engine.completion import Completion, Request, read_completion
from asyncrl.engine.episode import Episode
from asyncrl.engine.proxy import LLMProxy, running
from asyncrl.engine.vllm_setup import num_sampled, output_so_far, request_states
from asyncrl.messages import InFlight

SETTLING_TURNS = 100
"""Of the event loop, at most, until what the engine has returned is where it belongs; a few are enough."""


async def settle(proxy: LLMProxy) -> None:
    """Let responses that have just ended in the engine come to whoever waits for them."""
    for _ in range(SETTLING_TURNS):
        engine_ids = running(proxy.requests.values())
        if all(request_states(proxy.engine, engine_id) for engine_id in engine_ids):
            return
        await asyncio.sleep(0)


def read_in_flight(proxy: LLMProxy, episodes: dict[int, list[Episode]]) -> InFlight:
    """How far the trajectories of training tickets are: of a single turn what there is, of others what is lost."""
    partials, lost = [], {}
    for ticket_id, of_ticket in episodes.items():
        if of_ticket[0].ticket.is_evaluation:
            continue
        if proxy.config.is_multi_turn or len(of_ticket) > 1:
            lost[ticket_id] = _num_sampled(proxy, of_ticket)
        elif (completion := _so_far(proxy, of_ticket[0])) is not None and completion.tokens:
            partials.append(completion.partial(ticket_id))
    return InFlight(partials, lost)


def _so_far(proxy: LLMProxy, episode: Episode) -> Completion | None:
    """The response of the only turn: whole if only its reward is missing, or as far as it is sampled."""
    if episode.turns:
        return episode.turns[0][1]
    if (request := proxy.requests.get(episode.request_id)) is None:
        return None
    outputs = map(output_so_far, request_states(proxy.engine, request.engine_id))
    segments = [*request.segments, *map(read_completion, outputs)]
    return Request(segments=segments).end("aborted")


def _num_sampled(proxy: LLMProxy, of_ticket: list[Episode]) -> int:
    """Tokens of a ticket's trajectories: of the turns that are over, and of the requests that run."""
    num_tokens = sum(
        len(completion.tokens) for episode in of_ticket for _, completion in episode.turns
    )
    for request in map(proxy.requests.get, {episode.request_id for episode in of_ticket}):
        if request is not None:
            num_tokens += len(request.tokens) + num_sampled(proxy.engine, request.engine_id)
    return num_tokens
