"""Responses in flight, read from a real engine that samples on, and gone on with: what a checkpoint holds of them."""

import asyncio
from dataclasses import asdict, replace
from types import SimpleNamespace

import numpy as np
import pytest
from engine_pair import PROMPT
from tiny_policy import VOCAB

from asyncrl.controller.tickets import TicketSource
from asyncrl.engine.episode import Episode
from asyncrl.engine.in_flight import read_in_flight, settle
from asyncrl.engine.proxy import LLMProxy
from asyncrl.records import Completion, Ticket
from extras.baselines import generate_group

NUM, MOST = 24, 280


def episode_of(pair, ticket, **options):
    """The trajectory of a ticket, asked of the engine, without an environment that could be asked for its reward."""
    if isinstance(ticket, int):
        ticket = Ticket(ticket, 0, 0, 1, 0, PROMPT, "", None, 1000 + ticket, 0, **options)
    return Episode(pair.config, ticket, 0, environment=None, generate=pair.proxy.generate)


async def sample(pair, episode, done):
    """What Episode.run does with the engine; `done` has the response when it has ended."""
    episode._tokens = list(PROMPT)
    done[episode.ticket.ticket_id] = await episode.act(MOST)


async def read(proxy, episodes, done):
    """In flight now, but for what has ended."""
    await settle(proxy)
    running = {i: [episode] for i, episode in episodes.items() if i not in done}
    found = read_in_flight(proxy, running)
    assert not found.lost
    return found.partials


async def read_when(num_tokens, proxy, episodes, done):
    """In flight when so many more tokens have been sampled in all, or all has ended."""
    wanted = None
    while True:
        found = await read(proxy, episodes, done)
        sampled = [len(partial.tokens) for partial in found.values()] + [
            len(whole.tokens) for whole in done.values()
        ]
        wanted = sum(sampled) + num_tokens if wanted is None else wanted
        if sum(sampled) >= wanted or len(done) == len(episodes):
            return found
        await asyncio.sleep(0.002)


def check_prefix(partial, whole):
    size = len(partial.tokens)
    assert 0 < size <= len(whole.tokens)
    assert partial.tokens == whole.tokens[:size]
    assert np.array_equal(partial.behavior_logprobs, whole.behavior_logprobs[:size])
    assert partial.policy_versions.tolist() == whole.policy_versions[:size].tolist()
    assert partial.behavior_logprobs.dtype == np.float32
    assert partial.policy_versions.dtype == np.int32


@pytest.mark.parametrize("mode", ["keep", "recompute", "resume"])
def test_what_is_read_while_sampling_is_a_prefix_of_what_the_request_returns_later(pair, mode):
    """Tokens, log-probs and versions alike, also across updates, in whose middle it is read as well."""
    first, done, reads = pair.proxy.version, {}, []

    async def run():
        episodes = {i: episode_of(pair, i) for i in range(NUM)}
        tasks = [asyncio.create_task(sample(pair, episode, done)) for episode in episodes.values()]
        for version in range(first + 1, first + 4):
            for _ in range(2):
                reads.append(await read_when(10 * NUM, pair.proxy, episodes, done))
            pair.perturb()
            staged = pair.stage(version)
            update = asyncio.create_task(pair.proxy.update(version, staged.messages))
            await asyncio.sleep(0)
            reads.append(await read(pair.proxy, episodes, done))
            await update
        await asyncio.gather(*tasks)

    with pair.on_update(mode):
        pair.run(run())
    assert sum(map(len, reads)) > NUM, "too little was in flight"
    for found in reads:
        for ticket_id, partial in found.items():
            check_prefix(partial, done[ticket_id])
            assert partial.finish_reason == "aborted"
    assert any(
        len(set(partial.policy_versions.tolist())) > 1
        for found in reads
        for partial in found.values()
    )
    grown = [
        len(found[i].tokens)
        for found in reads
        for i in [max(done, key=lambda i: len(done[i].tokens))]
        if i in found
    ]
    assert grown == sorted(grown) and grown[0] < grown[-1]


def test_nothing_in_flight_is_missed_when_it_is_read_at_every_turn_of_the_event_loop(pair):
    """A response that has just ended in the engine is on its way to whoever waits for it, and nowhere else."""
    done, last = {}, {}

    async def run():
        episodes = {i: episode_of(pair, i) for i in range(NUM)}
        tasks = [asyncio.create_task(sample(pair, episode, done)) for episode in episodes.values()]
        while len(done) < NUM:
            found = await read(pair.proxy, episodes, done)
            missed = last.keys() - found.keys() - done.keys()
            assert not missed, f"{missed} were in flight and are not"
            last.update(found)
            await asyncio.sleep(0)
        await asyncio.gather(*tasks)

    pair.run(run())
    assert len(last) == NUM
    for ticket_id, partial in last.items():
        check_prefix(partial, done[ticket_id])


def cut_and_go_on(pair, mode="keep", update=False):
    """Responses that are given up in the middle and go on from what was read of them, under other weights or not."""
    done, first = {}, pair.proxy.version
    weights = {first: pair.weights()}

    async def first_run():
        episodes = {i: episode_of(pair, i) for i in range(NUM)}
        tasks = [asyncio.create_task(sample(pair, episode, {})) for episode in episodes.values()]
        found = await read_when(20 * NUM, pair.proxy, episodes, done)
        await pair.proxy.abort(
            [episode.request_id for episode in episodes.values() if episode.request_id]
        )
        await asyncio.gather(*tasks)
        return found

    async def second_run(found):
        resumed = {i: episode_of(pair, i, prefix=partial) for i, partial in found.items()}
        await asyncio.gather(*(sample(pair, episode, done) for episode in resumed.values()))

    with pair.on_update(mode):
        for _ in range(20):  # on a busy machine the engine may be done before anybody looks
            found = pair.run(first_run())
            found = {
                i: partial for i, partial in found.items() if partial.finish_reason == "aborted"
            }
            if len(found) > NUM / 2:
                break
        if update:
            pair.perturb()
            weights[first + 1] = pair.weights()
            pair.sync(first + 1)
        pair.proxy.take_sampled()
        pair.run(second_run(found))
    return found, done, weights


@pytest.mark.parametrize("update", [False, True])
def test_a_response_that_goes_on_from_its_tokens_has_the_log_probs_that_the_trainer_computes(
    pair, update
):
    """Those before the cut under the weights before, those after it under the weights then: its cache is made anew."""
    found, done, weights = cut_and_go_on(pair, update=update)
    assert len(found) > NUM / 2
    for ticket_id, partial in found.items():
        check_prefix(partial, done[ticket_id])
        rest = done[ticket_id].policy_versions[len(partial.tokens) :]
        assert (
            len(rest)
            and set(rest.tolist()) == {max(weights)}
            and len(done[ticket_id].tokens) <= MOST
        )
    gaps = np.abs(np.concatenate([pair.gaps(done[ticket_id], weights) for ticket_id in found]))
    assert np.quantile(gaps, 0.995) < 1e-4 and gaps.max() < 0.05
    sampled = pair.proxy.take_sampled()
    assert (
        sampled.new
        == sampled.resumed
        == sum(len(done[i].tokens) - len(found[i].tokens) for i in found)
    )


def test_under_restart_a_prefix_of_other_weights_is_sampled_again_and_counted_and_one_of_these_is_kept(
    pair,
):
    found, done, weights = cut_and_go_on(pair, "restart", update=True)
    for ticket_id in found:
        assert set(done[ticket_id].policy_versions.tolist()) == {max(weights)}
    discarded = sum(len(partial.tokens) for partial in found.values())
    assert discarded > 0
    assert pair.proxy.take_sampled().discarded == discarded
    found, done, _ = cut_and_go_on(pair, "restart")
    for ticket_id, partial in found.items():
        check_prefix(partial, done[ticket_id])
    assert found and pair.proxy.take_sampled().discarded == 0


def test_a_response_that_waits_for_its_reward_is_not_sampled_again(pair):
    whole = pair.generate("whole")
    episode = episode_of(pair, 7)
    episode.turns = [(len(PROMPT), whole)]
    partial = read_in_flight(pair.proxy, {7: [episode]}).partials[7]
    assert partial.finish_reason == whole.finish_reason
    pair.proxy.take_sampled()
    done = {}
    pair.run(sample(pair, episode_of(pair, 7, prefix=partial), done))
    assert (done[7].tokens, done[7].finish_reason) == (whole.tokens, whole.finish_reason)
    assert (
        np.array_equal(done[7].behavior_logprobs, whole.behavior_logprobs)
        and pair.proxy.take_sampled().new == 0
    )


def test_tokens_that_nobody_can_go_on_from_are_counted(pair):
    """Of a group by one request, as long as it runs."""
    proxy = pair.proxy

    async def run():
        task = asyncio.create_task(generate_group(proxy, "5.0", PROMPT, seed=9, num_responses=4))
        ticket = Ticket(5, 0, 0, 4, 0, PROMPT, "", None, 9, 0)
        episodes = [
            Episode(pair.config, ticket, member, environment=None, generate=None)
            for member in range(4)
        ]
        for episode in episodes:
            episode.request_id = "5.0"
        counts = []
        while not task.done():
            found = read_in_flight(proxy, {5: episodes})
            assert not found.partials
            counts.append(found.lost[5])
            await asyncio.sleep(0.002)
            await settle(proxy)
        return counts, sum(len(completion.tokens) for completion in await task)

    counts, total = pair.run(run())
    assert counts == sorted(counts) and len(set(counts) - {0}) > 0 and counts[-1] <= total


def test_turns_of_an_environment_are_counted_as_lost_and_an_evaluation_is_not_in_flight():
    turn = Completion([1, 2, 3], np.zeros(3, np.float32), np.zeros(3, np.int32), "stop")
    config = SimpleNamespace(is_multi_turn=True)
    proxy = LLMProxy(config, SimpleNamespace(), [])

    def episode(group_id, num_turns):
        ticket = Ticket(1, group_id, 0, 1, 0, (), "", 3, 0, 0)
        made = Episode(config, ticket, 0, environment=None, generate=None)
        made.turns = [(0, turn)] * num_turns
        return made

    found = read_in_flight(proxy, {1: [episode(4, 2)], 2: [episode(-1, 1)], 3: [episode(5, 0)]})
    assert found.lost == {1: 6, 3: 0} and found.partials == {}
    assert asdict(found)["partials"] == {}


def lengths_with_cuts(pair, first, num_cuts, goes_on=True):
    """Lengths of responses of which all that run are thrown away, and gone on with or started over, a few times."""
    source, done, tickets = TicketSource(pair.config, None), {}, {}
    for i in range(first, first + 256):
        tickets[i] = episode_of(pair, i).ticket

    async def run(share):
        left, ended = [ticket for i, ticket in tickets.items() if i not in done], {}
        episodes = {ticket.ticket_id: episode_of(pair, ticket) for ticket in left}
        tasks = [asyncio.create_task(sample(pair, episode, ended)) for episode in episodes.values()]
        while len(ended) < share * len(left):
            await asyncio.sleep(0.002)
        found = await read(pair.proxy, episodes, ended)
        done.update(ended)
        for i, partial in found.items():
            anew = replace(tickets[i], seed=tickets[i].seed + 1)
            tickets[i] = source.continued(tickets[i], partial) if goes_on else anew
        await pair.proxy.abort(
            [episode.request_id for episode in episodes.values() if episode.request_id]
        )
        await asyncio.gather(*tasks)

    for _ in range(num_cuts):
        pair.run(run(1 / 6))
    pair.run(run(1))
    return np.sort([len(completion.tokens) for completion in done.values()])


def distance(one, other):
    """Of Kolmogorov and Smirnov: the largest difference between two distributions."""
    shares = [
        np.searchsorted(lengths, range(MOST + 1), "right") / len(lengths)
        for lengths in (one, other)
    ]
    return np.abs(shares[0] - shares[1]).max()


def test_responses_that_go_on_after_cuts_are_as_long_as_those_that_were_not_cut(pair, monkeypatch):
    """Started over instead they are shorter: what is in flight at a cut are mostly the long ones."""
    monkeypatch.setattr(pair.proxy, "stop_token_ids", list(range(0, VOCAB, 50)))
    whole = lengths_with_cuts(pair, 0, 0)
    one_in_1000 = 1.95 * np.sqrt(2 / len(whole))
    assert distance(whole, lengths_with_cuts(pair, 1000, 6)) < one_in_1000
    assert distance(whole, lengths_with_cuts(pair, 2000, 6, goes_on=False)) > 2 * one_in_1000
