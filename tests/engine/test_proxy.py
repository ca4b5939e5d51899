"""The engine as a worker uses it: a random walk with a fake engine, and real vLLM against the trainer's own forward."""

import asyncio
import os
import random
import signal
from dataclasses import replace

import numpy as np
import pytest
from engine_pair import PROMPT, start_pair
from fake_engine import SamplingEngine, random_tokens
from tiny_policy import VOCAB

from asyncrl.config import Config
from asyncrl.controller.tickets import TicketSource
from asyncrl.engine.episode import Episode
from asyncrl.engine.in_flight import read_in_flight, settle
from asyncrl.engine.proxy import LLMProxy
from asyncrl.records import Completion, Ticket
from extras.baselines import generate_group

LONG_PROMPT = tuple(np.random.default_rng(0).integers(3, VOCAB, 150).tolist())
EOS, MAX_TOKENS = 2, 120
MODES = ("keep", "recompute", "resume", "restart", "wait")


@pytest.fixture(scope="module")
def pair(model):
    lengths = {"max_prompt_tokens": 400, "max_response_tokens": 100}
    with start_pair(Config(model=model, temperature=0.7, top_p=0.9, **lengths)) as pair:
        yield pair


def largest_gap(pair, completion, prompt=PROMPT, raw=False):
    trainer = pair.trainer_logprobs(prompt, completion.tokens, raw=raw)
    return np.abs(completion.behavior_logprobs - trainer).max()


CUTS = [
    {},
    {"top_p": 0.8},
    {"top_k": 7},
    {"min_p": 0.1},
    {"top_p": 0.8, "top_k": 20, "min_p": 0.05},
]


@pytest.mark.parametrize("cuts", CUTS)
def test_behavior_logprobs_are_the_trainers_under_temperature_and_what_cuts_the_vocabulary(
    pair, cuts
):
    with pair.options(**cuts):
        completion = pair.generate(f"sampled-with-{cuts}")
        assert len(completion.tokens) > 1 and largest_gap(pair, completion) < 1e-4
    if cuts:
        assert largest_gap(pair, completion) > 1e-2
    assert largest_gap(pair, completion, raw=True) > 1e-2


def test_a_later_request_reads_only_the_end_of_an_equal_prompt(pair):
    from vllm import SamplingParams

    prompt = [3 + token % 90 for token in range(40)]
    params = SamplingParams(max_tokens=1, detokenize=False)
    finals = [
        pair.run(pair.proxy.run_request(f"member-{member}", prompt, params)) for member in range(2)
    ]
    assert [final.num_cached_tokens for final in finals] == [0, 32]


def test_a_seed_draws_one_response_and_without_one_each_token_is_the_likeliest(pair):
    first, again, other = (
        pair.generate(f"seed-{i}", seed=seed).tokens for i, seed in enumerate((5, 5, 6))
    )
    greedy = pair.generate("greedy", seed=None).tokens
    assert first == again != other and greedy not in (first, other)
    with pair.options(top_k=1):
        assert not pair.trainer_logprobs(PROMPT, greedy).any(), "nothing else would be drawn"


class Sampling:
    """Responses that an engine samples, read at every turn of the event loop until the last one has ended."""

    def __init__(self, proxy, tickets):
        self.proxy, self.responses, self.reads = proxy, {}, []
        parts = {"environment": None, "generate": proxy.generate}
        self.episodes = {t.ticket_id: Episode(proxy.config, t, 0, **parts) for t in tickets}

    def start(self):
        return [self.read(), *map(self.act, self.episodes)]

    async def act(self, ticket_id):
        episode = self.episodes[ticket_id]
        episode.tokens = list(LONG_PROMPT)
        self.responses[ticket_id] = await episode.act(MAX_TOKENS)

    async def read(self):
        """What has been read once is read again, until it has ended."""
        partials = {}
        while len(self.responses) < len(self.episodes):
            await settle(self.proxy)
            left = {i: [e] for i, e in self.episodes.items() if i not in self.responses}
            in_flight = read_in_flight(self.proxy, left)
            assert partials.keys() & left.keys() <= in_flight.partials.keys()
            partials = in_flight.partials
            self.reads.append(partials)
            await asyncio.sleep(0)


@pytest.mark.parametrize("mode", ["keep", "recompute", "resume"])
def test_every_token_is_what_the_version_it_claims_would_have_sampled(pair, mode):
    """Through updates, and when a response is continued later from what was read of it in flight.

    The prompt fills a block of the prefix cache. No new request may read one that was computed under other weights.
    """
    tickets = [Ticket(i, 0, 0, 1, 0, LONG_PROMPT, "", None, 1000 + i, 0) for i in range(12)]
    with pair.options(on_update=mode):
        first = Sampling(pair.proxy, tickets)
        _, weights = pair.run_through_updates(first.start)
        partials = max(first.reads, key=lambda partials: sum(map(is_mixed, partials.values())))
        resume = TicketSource(pair.config, None).continued
        second = Sampling(pair.proxy, [resume(tickets[i], partials[i]) for i in partials])
        pair.run_through_updates(second.start, 0)
    assert any(map(is_mixed, partials.values()))
    gaps, gaps_behind = [], []
    for i, response in first.responses.items():
        is_behind = (mode == "keep") & (response.policy_versions > response.policy_versions[0])
        gap = pair.gaps(response, weights, LONG_PROMPT)
        gaps.append(gap[~is_behind])
        gaps_behind.append(gap[is_behind])
        sizes = [check_beginning(read[i], response) for read in first.reads if i in read]
        assert sizes == sorted(sizes) and len(set(sizes)) > 2
    for i, partial in partials.items():
        size = check_beginning(partial, second.responses[i])
        gaps.append(pair.gaps(second.responses[i], weights, LONG_PROMPT)[size:])
    # Rounding may put a token at the edge of the nucleus on either side, once in thousands.
    gaps = np.concatenate(gaps)
    assert np.quantile(gaps, 0.995) < 1e-4 and gaps.max() < 0.05
    if mode == "keep":
        behind = np.concatenate(gaps_behind)
        assert behind.mean() > 1e-3, "the old keys and values are attended to"


def is_mixed(completion):
    return len(set(completion.policy_versions)) > 1


def check_beginning(partial, response):
    """What was read in flight is the beginning of the response. Returns its size."""
    rows = rows_of(partial)
    assert rows and rows == rows_of(response)[: len(rows)]
    assert partial.finish_reason == "interrupted"
    return len(rows)


def test_one_request_gives_a_whole_group_of_which_nothing_in_flight_can_be_continued(pair):
    ticket = Ticket(5, 0, 0, 6, 0, PROMPT, "", None, 9, 0)
    episodes = [Episode(pair.config, ticket, i, environment=None, generate=None) for i in range(6)]
    episodes[0].request_ids = {"5.0"}

    async def run():
        group = generate_group(pair.proxy, "5.0", PROMPT, seed=3, num_responses=6)
        task = asyncio.create_task(group)
        while not task.done():
            assert read_in_flight(pair.proxy, {5: episodes}).partials == {}
            await asyncio.sleep(0.002)
            await settle(pair.proxy)
        return await task

    completions = pair.run(run())
    assert len({tuple(completion.tokens) for completion in completions}) == 6
    assert max(largest_gap(pair, completion) for completion in completions) < 1e-4


def test_an_engine_that_is_stopped_is_noticed_while_it_samples(pair, monkeypatch):
    (engine,) = pair.proxy.engine.engine_core.resources.engine_manager.processes
    monkeypatch.setattr(pair.proxy, "config", replace(pair.config, timeout_s=0.5))

    async def watch():
        response = asyncio.create_task(pair.proxy.generate("watched", PROMPT, 1, 100))
        await asyncio.sleep(0.01)
        os.kill(engine.pid, signal.SIGSTOP)
        try:
            await pair.proxy.watch()
        finally:
            os.kill(engine.pid, signal.SIGCONT)
            await response

    with pytest.raises(TimeoutError, match="an answer of the engine took more than 0 s"):
        pair.run(watch())


class Walk:
    """A proxy and an engine, to which a random order of things happens."""

    def __init__(self, mode, seed):
        self.rng = random.Random(seed)
        self.mode = mode
        self.engine = SamplingEngine(random_tokens(self.rng, range(3, 9), EOS), EOS)
        self.proxy = LLMProxy(Config(on_update=mode, max_response_tokens=9), self.engine, [EOS])
        self.version = -1
        self.tasks = {}
        self.prefixes = {}
        self.max_tokens = {}
        self.cancelled = set()

    async def run(self):
        await self.update()
        for _ in range(80):
            await self.rng.choice((self.ask, self.ask, self.update, self.suspend, self.abort))()
            for _ in range(self.rng.randrange(6)):
                await asyncio.sleep(0)
        await self.update()
        await asyncio.gather(*self.tasks.values())

    async def ask(self):
        """Ask for a response, or for one that a worker before has begun or ended."""
        name = str(len(self.tasks))
        size = self.rng.choice((0, 0, 2))
        version = self.rng.randint(max(0, self.version - 1), self.version)
        reason = self.rng.choice(("interrupted", "interrupted", "stop"))
        prefix = Completion(
            [3, 4][:size],
            reason,
            behavior_logprobs=np.zeros(size, np.float32),
            policy_versions=np.full(size, version, np.int32),
        )
        self.prefixes[name] = prefix if size else None
        self.max_tokens[name] = self.rng.randint(3, 9)
        response = self.proxy.generate(
            name, PROMPT, 1000, self.max_tokens[name], prefix=self.prefixes[name]
        )
        self.tasks[name] = asyncio.create_task(response)

    async def update(self):
        self.version += 1
        receiving = self.rng.choice((None, lambda: self.engine.enter("receive", "start")))
        infos = [{"version": self.version}] * self.rng.randint(1, 2)
        await self.proxy.load_weights(self.version, infos, receiving)

    async def suspend(self):
        await self.proxy.suspend()
        has_requests = any(request.engine_id for request in self.proxy.requests.values())
        if not has_requests and self.engine.state == "pause" and self.rng.random() < 0.5:
            await self.proxy.sleep()

    async def abort(self):
        names = self.rng.sample(sorted(self.tasks), min(2, len(self.tasks)))
        self.cancelled.update(name for name in names if not self.tasks[name].done())
        await self.proxy.abort([*names, "unknown", None])

    def check(self):
        """Each caller has one whole response, and every token that was sampled is counted once."""
        sampled, num_kept, num_before = self.proxy.take_sampled(), 0, 0
        for name, task in self.tasks.items():
            completion, prefix = task.result(), self.prefixes[name]
            requests = self.engine.requests_of(name)
            if prefix is not None and prefix.finish_reason == "stop":
                assert completion is prefix and not requests
                continue
            num_kept += len(rows_of(completion))
            num_before += len(rows_of(prefix))
            self.check_response(name, completion, prefix, requests)
        resumed = [request for request in self.engine.requests if len(request.prompt) > len(PROMPT)]
        assert sampled.new == self.engine.num_sampled
        assert sampled.resumed == sum(len(request.rows) for request in resumed)
        assert num_kept == num_before + sampled.new - sampled.discarded
        assert (sampled.discarded > 0) == (self.mode == "restart")
        assert not self.proxy.requests and self.proxy.version == self.version
        states = {(state, reason) for _, state, reason in self.proxy.activity.report().changes}
        assert ("paused", "update") in states

    def check_response(self, name, completion, prefix, requests):
        """A response is what was there before and all that was sampled for it, or only that of the last version."""
        rows, expected = rows_of(completion), rows_of(prefix)
        for request in requests:
            if self.mode == "restart":
                expected = [row for row in expected if row[2] == request.version]
            assert request.prompt == [*PROMPT, *(token for token, *_ in expected)]
            expected += request.rows
        assert rows == expected or (completion.finish_reason == "interrupted" and not rows)
        ends = {"stop": rows[-1:] and rows[-1][0] == EOS, "interrupted": name in self.cancelled}
        assert ends.get(completion.finish_reason, len(rows) == self.max_tokens[name])
        assert len(rows) <= self.max_tokens[name]
        if self.mode in ("keep", "recompute", "wait"):
            assert len(requests) <= 1
        if self.mode != "restart":
            assert len({request.seed for request in requests}) == len(requests)
        if self.mode == "wait" and prefix is None:
            assert len({version for *_, version in rows}) <= 1


def rows_of(completion):
    """Token, log-prob and version of each token of a response."""
    if completion is None:
        return []
    columns = completion.behavior_logprobs.tolist(), completion.policy_versions.tolist()
    return list(zip(completion.tokens, *columns, strict=True))


@pytest.mark.parametrize("mode", MODES)
def test_every_caller_gets_one_response_whatever_happens_meanwhile(mode):
    for seed in range(20):
        walk = Walk(mode, seed)
        asyncio.run(asyncio.wait_for(walk.run(), 100))
        walk.check()


@pytest.mark.parametrize(
    ("receiving", "end"), [(None, "0 s$"), (lambda: None, "0 s.+ try NCCL_P2P_DISABLE=1 in the ")]
)
def test_an_update_that_hangs_is_an_error_after_which_nothing_is_sampled(receiving, end):
    """With NCCL, which calls `receiving`, the error also names a cause of such a wait."""
    engine = SamplingEngine(None, EOS)
    load = engine.update_weights

    async def hang(request):
        await load(request)
        await asyncio.Event().wait()

    engine.update_weights = hang
    proxy = LLMProxy(Config(timeout_s=0.1), engine, [])
    with pytest.raises(TimeoutError, match=f"loading version 3 took more than {end}"):
        asyncio.run(proxy.load_weights(3, [{"version": 3}], receiving))
    assert engine.state != "resume"
