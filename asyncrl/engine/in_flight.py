"""The progress of an engine's responses, read while the engine continues to sample."""

import asyncio

from asyncrl.engine.completion import Request, read_completion
from asyncrl.engine.episode import Episode
from asyncrl.engine.proxy import LLMProxy, engine_ids_of
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
    """Return the progress of training responses of one turn and one request. A resume can continue only these."""
    partials = {}
    for ticket_id, (first, *others) in episodes.items():
        if proxy.config.is_multi_turn or others or first.ticket.is_evaluation:
            continue
        completion = _read_response(proxy, first)
        if completion is not None and completion.tokens:
            partials[ticket_id] = completion
    return InFlight(partials)


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


def request_states(engine, request_id: str) -> list:
    """Return vLLM's records of a running request, one for each response; an empty list after its end."""
    processor = engine.output_processor
    return [
        processor.request_states[internal_id]
        for internal_id in processor.external_req_ids.get(request_id, ())
    ]


def output_so_far(state):
    """Return the CompletionOutput that a request would have if it were aborted now."""
    from vllm.v1.engine import FinishReason

    return state.make_request_output([], None, FinishReason.ABORT, None).outputs[0]
