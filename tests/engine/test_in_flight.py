"""Responses in flight, read from a real engine while it samples, and continued: what a checkpoint holds of them."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
from engine_pair import PROMPT

from asyncrl.controller.tickets import TicketSource
from asyncrl.engine.episode import Episode
from asyncrl.engine.in_flight import read_in_flight, settle
from asyncrl.engine.proxy import LLMProxy
from asyncrl.records import Completion, Ticket

NUM_RESPONSES, MAX_TOKENS = 24, 280


def make_ticket(ticket_id):
    return Ticket(ticket_id, 0, 0, 1, 0, PROMPT, "", None, 1000 + ticket_id, 0)


class Sampling:
    """Trajectories that an engine samples, without an environment that could be asked for rewards."""

    def __init__(self, pair, tickets):
        self.proxy, self.done = pair.proxy, {}
        self.episodes = {
            ticket.ticket_id: Episode(
                pair.config, ticket, 0, environment=None, generate=pair.proxy.generate
            )
            for ticket in tickets
        }
        self.tasks = [asyncio.create_task(self._act(e)) for e in self.episodes.values()]

    async def _act(self, episode):
        episode._tokens = list(PROMPT)
        self.done[episode.ticket.ticket_id] = await episode.act(MAX_TOKENS)

    async def read(self):
        """Return what is in flight now, but for what has ended."""
        await settle(self.proxy)
        running = {i: [episode] for i, episode in self.episodes.items() if i not in self.done}
        in_flight = read_in_flight(self.proxy, running)
        assert not in_flight.lost
        return in_flight.partials

    async def end(self):
        """Give up all that still runs."""
        names = [next(iter(episode.request_ids), None) for episode in self.episodes.values()]
        await self.proxy.abort(names)
        await asyncio.gather(*self.tasks)


def check_prefix(partial, whole):
    size = len(partial.tokens)
    assert 0 < size <= len(whole.tokens)
    assert partial.tokens == whole.tokens[:size]
    assert np.array_equal(partial.behavior_logprobs, whole.behavior_logprobs[:size])
    assert partial.policy_versions.tolist() == whole.policy_versions[:size].tolist()
    assert partial.behavior_logprobs.dtype == np.float32
    assert partial.policy_versions.dtype == np.int32 and partial.finish_reason == "aborted"


@pytest.mark.parametrize("mode", ["keep", "resume"])
def test_what_is_read_at_every_turn_of_the_loop_is_all_that_runs_and_a_prefix_of_it(pair, mode):
    """Tokens, log-probs and versions alike, also in the middle of updates.

    A response that has just ended in the engine is on its way to its caller, and nowhere else.
    """
    reads = []

    async def update():
        for _ in range(3):
            await asyncio.sleep(0.05)
            pair.perturb()
            version = pair.proxy.version + 1
            await pair.proxy.update(version, pair.stage(version).messages)

    async def run():
        sampling, last = Sampling(pair, map(make_ticket, range(NUM_RESPONSES))), {}
        updates = asyncio.create_task(update())
        while len(sampling.done) < NUM_RESPONSES:
            found = await sampling.read()
            missed = last.keys() - found.keys() - sampling.done.keys()
            assert not missed, f"{missed} were in flight and are not"
            last |= found
            reads.append(found)
            await asyncio.sleep(0)
        await asyncio.gather(updates, *sampling.tasks)
        assert len(last) > NUM_RESPONSES / 2
        return sampling.done

    with pair.options(on_update=mode):
        done = pair.run(run())
    partials = [
        partial for found in reads[:: max(1, len(reads) // 50)] for partial in found.items()
    ]
    for ticket_id, partial in partials:
        check_prefix(partial, done[ticket_id])
    sizes = [len(partial.tokens) for ticket_id, partial in partials if ticket_id == 0]
    assert sizes == sorted(sizes) and len(set(sizes)) > 2
    assert any(len(set(partial.policy_versions)) > 1 for _, partial in partials)


def test_a_response_that_continues_from_its_tokens_has_the_log_probs_that_the_trainer_computes(
    pair,
):
    """Log-probs before the cut are of the weights before, those after it of the weights then: the cache is new."""
    source, first_version = TicketSource(pair.config, None), pair.proxy.version
    tickets = {ticket_id: make_ticket(ticket_id) for ticket_id in range(NUM_RESPONSES)}

    async def run(tickets, num_tokens=None):
        sampling = Sampling(pair, tickets)
        found = {}
        while num_tokens and sum(len(partial.tokens) for partial in found.values()) < num_tokens:
            assert len(sampling.done) < NUM_RESPONSES / 2
            found = await sampling.read()
            await asyncio.sleep(0)
        if num_tokens:
            await sampling.end()
        await asyncio.gather(*sampling.tasks)
        return found, sampling.done

    found, _ = pair.run(run(tickets.values(), 10 * NUM_RESPONSES))
    weights = {first_version: pair.weights()}
    pair.perturb()
    pair.sync(first_version + 1)
    weights[first_version + 1] = pair.weights()
    resumed = [
        source.continued(tickets[ticket_id], partial) for ticket_id, partial in found.items()
    ]
    _, done = pair.run(run(resumed))
    for ticket_id, partial in found.items():
        check_prefix(partial, done[ticket_id])
        rest = done[ticket_id].policy_versions[len(partial.tokens) :]
        assert set(rest.tolist()) == {first_version + 1}
        assert len(done[ticket_id].tokens) <= MAX_TOKENS
    gaps = np.abs(np.concatenate([pair.gaps(completion, weights) for completion in done.values()]))
    assert np.quantile(gaps, 0.995) < 1e-4 and gaps.max() < 0.05


TURN = Completion([1, 2, 3], np.zeros(3, np.float32), np.zeros(3, np.int32), "stop")


@pytest.mark.parametrize(
    ("is_multi_turn", "partials", "lost"), [(False, {0: TURN}, {}), (True, {}, {0: 6, 2: 0})]
)
def test_what_waits_for_a_reward_is_whole_turns_are_lost_and_an_evaluation_is_not_in_flight(
    is_multi_turn, partials, lost
):
    config = SimpleNamespace(is_multi_turn=is_multi_turn)
    episodes = {}
    for ticket_id, (group_id, num_turns) in enumerate([(4, 2), (-1, 1), (5, 0)]):
        ticket = Ticket(ticket_id, group_id, 0, 1, 0, (), "", 3, 0, 0)
        episode = Episode(config, ticket, 0, environment=None, generate=None)
        episode.turns = [(0, TURN)] * num_turns
        episodes[ticket_id] = [episode]
    in_flight = read_in_flight(LLMProxy(config, SimpleNamespace(), []), episodes)
    assert in_flight.partials == partials and in_flight.lost == lost
