"""The engine as a worker uses it: a random walk with a fake engine, and real vLLM against the trainer's own forward."""

import asyncio
import os
import random
import signal
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from engine_pair import PROMPT
from tiny_policy import VOCAB

from asyncrl.config import Config
from asyncrl.engine.proxy import LLMProxy
from asyncrl.records import Completion
from extras.baselines import generate_group

LONG_PROMPT = tuple(np.random.default_rng(0).integers(3, VOCAB, 150).tolist())
MODES = ("keep", "recompute", "resume", "restart", "wait")


def largest_gap(pair, completion, prompt=PROMPT, raw=False):
    trainer = pair.trainer_logprobs(prompt, completion.tokens, raw=raw)
    return np.abs(completion.behavior_logprobs - trainer).max()


@pytest.mark.parametrize("cuts", [{}, {"top_p": 0.8, "top_k": 20, "min_p": 0.05}])
def test_behavior_logprobs_are_the_trainers_under_temperature_and_what_cuts_the_vocabulary(
    pair, cuts
):
    with pair.options(**cuts):
        completion = pair.generate(f"sampled-with-{cuts}")
        assert len(completion.tokens) > 1 and largest_gap(pair, completion) < 1e-4
    if cuts:
        assert largest_gap(pair, completion) > 1e-2
    assert largest_gap(pair, completion, raw=True) > 1e-2


def test_a_seed_draws_one_response_and_without_one_each_token_is_the_likeliest(pair):
    first, again, other = (
        pair.generate(f"seed-{i}", seed=seed).tokens for i, seed in enumerate((5, 5, 6))
    )
    greedy = pair.generate("greedy", seed=None).tokens
    assert first == again != other and greedy not in (first, other)
    for size in range(min(3, len(greedy))):
        prompt = (*PROMPT, *greedy[:size])
        logprobs = [pair.trainer_logprobs(prompt, [token], raw=True)[0] for token in range(VOCAB)]
        assert greedy[size] == np.argmax(logprobs)


@pytest.mark.parametrize("mode", MODES)
def test_every_token_is_what_the_version_it_claims_would_have_sampled(pair, mode):
    pair.proxy.take_sampled()
    with pair.options(on_update=mode):
        completions, weights = pair.generate_through_updates()
        sampled = pair.proxy.take_sampled()
        # under `keep` too: no new request may read a cache that was computed under other weights
        for name in ("before", "after"):
            assert largest_gap(pair, pair.generate(name, LONG_PROMPT), LONG_PROMPT) < 1e-4
            pair.perturb()
            pair.sync(pair.proxy.version + 1)
    assert sampled.new == sum(map(len_of, completions)) + sampled.discarded
    mixed = [completion for completion in completions if len(set(completion.policy_versions)) > 1]
    assert bool(mixed) == (mode in ("keep", "recompute", "resume"))
    gaps = [np.abs(pair.gaps(completion, weights)) for completion in completions]
    if mode == "keep":
        stale = [
            gap[c.policy_versions > c.policy_versions[0]]
            for gap, c in zip(gaps, completions, strict=True)
        ]
        assert np.concatenate(stale).mean() > 1e-3, "the old keys and values are attended to"
        gaps = [
            gap[c.policy_versions == c.policy_versions[0]]
            for gap, c in zip(gaps, completions, strict=True)
        ]
    # Rounding may put a token at the edge of the nucleus on either side, once in thousands.
    gaps = np.concatenate(gaps)
    assert np.quantile(gaps, 0.995) < 1e-4 and gaps.max() < 0.05


def len_of(completion):
    assert (
        len(completion.tokens)
        == len(completion.behavior_logprobs)
        == len(completion.policy_versions)
    )
    return len(completion.tokens)


def test_one_request_gives_a_whole_group_and_when_aborted_returns_what_every_member_has(pair):
    completions = pair.run(generate_group(pair.proxy, "group", PROMPT, seed=3, num_responses=6))
    assert len({tuple(completion.tokens) for completion in completions}) == 6
    assert max(largest_gap(pair, completion) for completion in completions) < 1e-4

    async def abort_soon():
        group = generate_group(pair.proxy, "aborted", PROMPT, seed=4, num_responses=6)
        task = asyncio.create_task(group)
        await asyncio.sleep(0.02)
        await pair.proxy.abort(["aborted"])
        return await task

    completions = pair.run(abort_soon())
    assert len(completions) == 6
    assert "aborted" in {completion.finish_reason for completion in completions}


def test_an_engine_that_samples_is_no_error_and_one_that_is_stopped_meanwhile_is(pair):
    (engine,) = pair.proxy.engine.engine_core.resources.engine_manager.processes

    async def watch(limit_s):
        response = asyncio.create_task(pair.proxy.generate("watched", PROMPT, seed=1))
        await asyncio.sleep(0.01)
        if limit_s is None:
            os.kill(engine.pid, signal.SIGSTOP)
        try:
            await asyncio.wait_for(pair.proxy.watch(), limit_s)
        finally:
            os.kill(engine.pid, signal.SIGCONT)
            await response

    config, pair.proxy.config = pair.proxy.config, replace(pair.proxy.config, timeout_s=2.0)
    try:
        with pytest.raises(TimeoutError, match=r"^$"):
            pair.run(watch(3))
        with pytest.raises(TimeoutError, match="an answer of the engine took more than 2 s"):
            pair.run(watch(None))
    finally:
        pair.proxy.config = config


class FakeEngine:
    """The calls of vLLM. A step samples a token of a request: the number of tokens that are before it.

    It insists on the order of an update, and on requests that are neither paused nor stamped with an older version.
    """

    def __init__(self, rng):
        self.rng = rng
        self.engine_core = self
        self.version = None
        self.requests = {}
        self.seeds = {}
        self.calls = []
        self.num_sampled = 0
        self.num_resumed = 0

    @property
    def state(self):
        return self.calls[-1] if self.calls else "resume"

    async def generate(self, prompt, params, engine_id):
        assert self.state == "resume" and prompt["cache_salt"] == self.version
        self.seeds.setdefault(engine_id.partition("-")[0], []).append(params.seed)
        # as with vLLM, the engine does not know it at once
        await asyncio.sleep(0)
        request = SimpleNamespace(versions=[], ended=asyncio.Event(), reason=None)
        request.first, request.max_tokens = len(prompt["prompt_token_ids"]), params.max_tokens
        self.requests[engine_id] = request
        await request.ended.wait()
        size = len(request.versions)
        spans = [
            SimpleNamespace(version=version, start=place, end=place + 1)
            for place, version in enumerate(request.versions)
        ]
        output = SimpleNamespace(
            index=0,
            token_ids=[request.first + place for place in range(size)],
            finish_reason=request.reason,
            logprobs=SimpleNamespace(logprobs=[-float(place) for place in range(size)]),
            weight_versions=spans,
        )
        yield SimpleNamespace(finished=True, outputs=[output])

    def step(self):
        if self.requests and self.state == "resume":
            engine_id = self.rng.choice(list(self.requests))
            request = self.requests[engine_id]
            request.versions.append(self.version)
            self.num_sampled += 1
            self.num_resumed += request.first > len(PROMPT)
            if len(request.versions) == request.max_tokens:
                self.end(engine_id, "length")
            elif self.rng.random() < 0.1:
                self.end(engine_id, "stop")

    def end(self, engine_id, reason):
        request = self.requests.pop(engine_id)
        request.reason = reason
        request.ended.set()

    async def abort(self, engine_ids):
        for engine_id in engine_ids:
            if engine_id in self.requests:
                self.end(engine_id, "abort")

    async def pause_scheduler_async(self, mode, clear_cache):
        while mode == "wait" and self.requests:
            self.step()
            await asyncio.sleep(0)
        self.call("pause", after="resume")

    async def sleep(self, level, mode):
        assert not self.requests and level == 2
        self.call("sleep", after="pause")

    async def wake_up(self):
        self.call("pause", after="sleep")

    async def start_weight_update(self):
        self.call("start", after="pause")

    async def update_weights(self, request):
        assert self.state in ("start", "receive", "load")
        self.calls.append("load")
        self.loaded = request.update_info["version"]

    async def finish_weight_update(self):
        self.call("finish", after="load")

    async def update_weight_version(self, version):
        assert version == str(self.loaded)
        self.version = version
        self.call("stamp", after="finish")

    async def resume_generation(self):
        assert self.state in ("stamp", "pause")
        self.calls.append("resume")

    def call(self, name, after):
        assert self.state == after, f"{name} after {self.state}"
        self.calls.append(name)


class Walk:
    """A proxy and a fake engine, to which a random order of things happens."""

    def __init__(self, mode, seed):
        self.rng = random.Random(seed)
        self.mode = mode
        self.engine = FakeEngine(self.rng)
        self.proxy = LLMProxy(Config(on_update=mode, max_response_tokens=9), self.engine, [])
        self.version = -1
        self.tasks = {}
        self.prefixes = {}
        self.max_tokens = {}
        self.aborted = set()

    async def run(self):
        await self.update()
        events = [self.ask, self.step, self.step, self.step, self.update, self.suspend, self.abort]
        if self.mode not in ("resume", "restart"):
            events.append(self.ask_by_group)
        for _ in range(80):
            await self.rng.choice(events)()
            for _ in range(self.rng.randrange(3)):
                await asyncio.sleep(0)
        await self.update()
        while not all(task.done() for task in self.tasks.values()):
            await self.step()
            await asyncio.sleep(0)

    async def ask(self):
        """Ask for a response, or for one that a worker before has begun or ended."""
        name = str(len(self.tasks))
        size = self.rng.choice((0, 0, 2))
        version = self.rng.randint(max(0, self.version - 1), self.version)
        reason = self.rng.choice(("aborted", "aborted", "stop"))
        tokens = [len(PROMPT) + place for place in range(size)]
        prefix = Completion(
            tokens, np.zeros(size, np.float32), np.full(size, version, np.int32), reason
        )
        self.prefixes[name] = prefix if size else None
        self.max_tokens[name] = self.rng.randint(3, 9)
        self.tasks[name] = asyncio.create_task(
            self.proxy.generate(
                name, PROMPT, 1000, self.max_tokens[name], prefix=self.prefixes[name]
            )
        )

    async def ask_by_group(self):
        name = str(len(self.tasks))
        self.prefixes[name] = None
        self.max_tokens[name] = 9
        group = generate_group(self.proxy, name, PROMPT, 1000, 1)
        self.tasks[name] = asyncio.create_task(group)

    async def step(self):
        self.engine.step()

    async def update(self):
        self.version += 1
        receiving = self.rng.choice((None, lambda: self.engine.call("receive", after="start")))
        infos = [{"version": self.version}] * self.rng.randint(1, 2)
        await self.proxy.update(self.version, infos, receiving)

    async def suspend(self):
        await self.proxy.suspend()
        has_requests = any(request.engine_id for request in self.proxy.requests.values())
        if not has_requests and self.engine.state == "pause" and self.rng.random() < 0.5:
            await self.proxy.sleep()

    async def abort(self):
        names = self.rng.sample(sorted(self.tasks), min(2, len(self.tasks)))
        self.aborted.update(name for name in names if not self.tasks[name].done())
        await self.proxy.abort([*names, "unknown", None])

    def check(self):
        """Each caller has one whole response, and every token that was sampled is counted once."""
        sampled, num_kept, num_before = self.proxy.take_sampled(), 0, 0
        for name, task in self.tasks.items():
            result = task.result()
            completion = result[0] if isinstance(result, list) else result
            size, prefix = len_of(completion), self.prefixes[name]
            versions = completion.policy_versions.tolist()
            assert completion.tokens == [len(PROMPT) + place for place in range(size)]
            assert size <= self.max_tokens[name] and versions == sorted(versions)
            seeds = self.engine.seeds.get(name, [])
            if prefix is not None and prefix.finish_reason == "stop":
                assert completion is prefix and not seeds
                continue
            num_kept += size
            num_before += 0 if prefix is None else len(prefix.tokens)
            assert completion.finish_reason != "aborted" or name in self.aborted
            assert completion.finish_reason != "length" or size == self.max_tokens[name]
            if self.mode == "restart" or (self.mode == "wait" and prefix is None):
                assert len(set(versions)) <= 1
            else:
                assert len(seeds) == len(set(seeds))
            assert len(seeds) <= 1 or self.mode in ("resume", "restart")
        assert sampled.new == self.engine.num_sampled and sampled.resumed == self.engine.num_resumed
        assert num_kept == num_before + sampled.new - sampled.discarded
        assert (sampled.discarded > 0) == (self.mode == "restart")
        assert not self.proxy.requests and self.proxy.version == self.version


@pytest.mark.parametrize("mode", MODES)
def test_every_caller_gets_one_response_whatever_happens_meanwhile(mode):
    for seed in range(20):
        walk = Walk(mode, seed)
        asyncio.run(asyncio.wait_for(walk.run(), 100))
        walk.check()


class FaultyEngine(FakeEngine):
    """Cannot load weights."""

    def __init__(self, error):
        super().__init__(random.Random(0))
        self.error = error
        self.loaded = 3

    def call(self, name, after):
        self.calls.append(name)

    async def update_weights(self, request):
        if self.error is not None:
            raise self.error
        await asyncio.sleep(60)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (RuntimeError("no such buffer"), "no such buffer"),
        (None, "loading version 3 took more than 0 s"),
    ],
)
def test_an_update_that_fails_or_hangs_is_an_error_after_which_nothing_is_sampled(error, line):
    engine = FaultyEngine(error)
    config = Config(timeout_s=60.0 if error else 0.1)
    with pytest.raises((RuntimeError, TimeoutError), match=line):
        asyncio.run(LLMProxy(config, engine, []).update(3, [{"version": 3}]))
    assert "resume" not in engine.calls
