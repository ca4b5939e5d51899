"""The engine as a worker uses it: real vLLM on the CPU, against the trainer's own forward."""

import asyncio
import os
import signal
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from engine_pair import PROMPT
from fake_link import SocketLink
from tiny_policy import VOCAB

from asyncrl.config import Config
from asyncrl.engine.proxy import LLMProxy
from asyncrl.engine.vllm_setup import num_sampled
from asyncrl.weights.ipc import CHUNK_BYTES
from asyncrl.weights.nccl import NcclTransport
from asyncrl.weights.transport import ParameterSpec
from extras.baselines import generate_group

LONG_PROMPT = tuple(np.random.default_rng(0).integers(3, VOCAB, 150).tolist())


def test_engine_and_trainer_agree_after_a_sync_and_only_then(pair):
    tokens = tuple(np.random.default_rng(1).integers(3, VOCAB, 60).tolist())

    def gap():
        engine = pair.run(pair.proxy.score(tokens))
        return np.abs(engine - pair.trainer_logprobs(tokens[:1], tokens[1:], raw=True)).max()

    assert gap() < 1e-4
    pair.perturb()
    assert gap() > 1e-2
    pair.sync(1)
    assert gap() < 1e-4


@pytest.mark.parametrize(
    "cuts",
    [
        {},
        {"top_k": 5},
        {"min_p": 0.2},
        {"top_p": 1.0, "top_k": 5},
        {"top_p": 0.8, "top_k": 20, "min_p": 0.05},
    ],
)
def test_behavior_logprobs_are_the_trainers_under_temperature_and_what_cuts_the_vocabulary(
    pair, cuts
):
    with pair.sampling(**cuts):
        completion = pair.generate(f"sampled-with-{cuts}")
        assert len(completion.tokens) > 1 and len(completion.behavior_logprobs) == len(
            completion.tokens
        )
        trainer = pair.trainer_logprobs(PROMPT, completion.tokens)
    assert np.abs(completion.behavior_logprobs - trainer).max() < 1e-4
    if cuts:
        without = pair.trainer_logprobs(PROMPT, completion.tokens)
        assert np.abs(completion.behavior_logprobs - without).max() > 1e-2
    raw = pair.trainer_logprobs(PROMPT, completion.tokens, raw=True)
    assert np.abs(completion.behavior_logprobs - raw).max() > 1e-2


def test_the_same_seed_draws_the_same_response_and_another_seed_another(pair):
    first, again, other = (
        pair.generate(f"seed-{i}", seed=seed) for i, seed in enumerate((5, 5, 6))
    )
    assert first.tokens == again.tokens != other.tokens


def test_without_a_seed_each_token_is_the_likeliest(pair):
    tokens = pair.generate("greedy", seed=None).tokens
    for n in range(min(3, len(tokens))):
        before = (*PROMPT, *tokens[:n])
        assert tokens[n] == max(
            range(VOCAB), key=lambda token: pair.trainer_logprobs(before, [token], raw=True)[0]
        )
    assert pair.generate("sampled-1", seed=1).tokens != tokens


def test_a_prefix_computed_under_other_weights_is_never_reused(pair):
    for name, version in (("before", 2), ("after", 3)):
        pair.perturb()
        pair.sync(version)
        completion = pair.generate(f"prefix-{name}", LONG_PROMPT)
        trainer = pair.trainer_logprobs(LONG_PROMPT, completion.tokens)
        assert np.abs(completion.behavior_logprobs - trainer).max() < 1e-4


@pytest.mark.parametrize("mode", ["recompute", "resume", "restart", "wait"])
def test_every_token_is_what_the_version_it_claims_would_have_sampled(pair, mode):
    pair.proxy.take_sampled()
    with pair.on_update(mode):
        completions, weights = pair.generate_through_updates()
    mixed = [completion for completion in completions if len(set(completion.policy_versions)) > 1]
    assert bool(mixed) == (mode in ("recompute", "resume")), (
        "the others keep a response to one version"
    )
    for completion in completions:
        assert (
            list(completion.policy_versions) == sorted(completion.policy_versions)
            and len(completion.tokens) <= 100
        )
    gaps = np.abs(np.concatenate([pair.gaps(completion, weights) for completion in completions]))
    # Rounding may put a token at the edge of the nucleus on either side, once in thousands.
    assert np.quantile(gaps, 0.995) < 1e-4 and gaps.max() < 0.05
    sampled = pair.proxy.take_sampled()
    kept = sum(len(completion.tokens) for completion in completions)
    assert sampled.new == kept + sampled.discarded
    assert (sampled.discarded > 0) == (mode == "restart") and (sampled.resumed > 0) == (
        mode == "resume"
    )


def test_under_keep_only_tokens_after_an_update_feel_the_old_cache(pair):
    with pair.on_update("keep"):
        completions, weights = pair.generate_through_updates()
    mixed = [completion for completion in completions if len(set(completion.policy_versions)) > 1]
    assert mixed, "no response was running during an update"
    for completion in mixed:
        gaps = np.abs(pair.gaps(completion, weights))
        before = completion.policy_versions == completion.policy_versions[0]
        assert gaps[before].max() < 1e-4
    stale = np.concatenate(
        [pair.gaps(c, weights)[c.policy_versions > c.policy_versions[0]] for c in mixed]
    )
    assert np.abs(stale).mean() > 1e-3, (
        "keys and values of the weights before are still attended to"
    )


def test_a_prefix_that_an_update_has_used_up_is_cut_and_not_resumed(pair):
    """Every response ends within its budget however often it is interrupted."""

    async def generate():
        tasks = [
            asyncio.create_task(pair.proxy.generate(f"cut-{i}", PROMPT, i, max_tokens=7))
            for i in range(16)
        ]
        for version in range(1000, 1010):
            await pair.proxy.update(version, pair.stage(version).messages)
        return await asyncio.gather(*tasks)

    with pair.on_update("resume"):
        completions = pair.run(generate())
    assert all(
        len(c.tokens) == len(c.behavior_logprobs) == len(c.policy_versions) <= 7
        for c in completions
    )
    assert {c.finish_reason for c in completions if len(c.tokens) == 7} <= {"length", "stop"}
    assert "aborted" not in {c.finish_reason for c in completions}


def test_what_is_suspended_goes_on_after_the_next_update_and_not_before(pair):
    async def generate(version):
        tasks = [
            asyncio.create_task(pair.proxy.generate(f"sus-{version}-{i}", PROMPT, i))
            for i in range(16)
        ]
        while not any(
            num_sampled(pair.proxy.engine, r.engine_id) > 2 for r in pair.proxy.requests.values()
        ):
            await asyncio.sleep(0.002)
        await pair.proxy.suspend()
        num_done = sum(task.done() for task in tasks)
        late = asyncio.create_task(pair.proxy.generate(f"sus-{version}-late", PROMPT, 99))
        await asyncio.sleep(0.2)
        assert sum(task.done() for task in tasks) == num_done < 16 and not late.done()
        assert await pair.proxy.update(version, pair.stage(version).messages) == 0.0
        assert set((await late).policy_versions) == {version}
        return await asyncio.gather(*tasks)

    for version, mode in ((2000, "resume"), (2001, "keep"), (2002, "recompute")):
        with pair.on_update(mode):
            completions = pair.run(generate(version))
        assert any(len(set(c.policy_versions)) == 2 for c in completions)


def test_one_request_gives_a_whole_group_with_different_responses(pair):
    completions = pair.run(generate_group(pair.proxy, "group", PROMPT, seed=3, num_responses=6))
    assert len(completions) == 6 and len({tuple(c.tokens) for c in completions}) == 6
    for completion in completions:
        assert (
            np.abs(
                completion.behavior_logprobs - pair.trainer_logprobs(PROMPT, completion.tokens)
            ).max()
            < 1e-4
        )


def test_an_aborted_group_returns_what_every_member_has(pair):
    async def abort_soon():
        task = asyncio.create_task(
            generate_group(pair.proxy, "ab-group", PROMPT, seed=4, num_responses=6)
        )
        await asyncio.sleep(0.02)
        await pair.proxy.abort(["ab-group"])
        return await task

    completions = pair.run(abort_soon())
    assert len(completions) == 6 and "aborted" in {c.finish_reason for c in completions}


def test_a_request_that_is_aborted_before_it_started_returns_empty(pair):
    async def abort_at_once():
        await pair.proxy.suspend()
        task = asyncio.create_task(pair.proxy.generate("early", PROMPT, 1))
        await asyncio.sleep(0)
        await pair.proxy.abort(["early", "unknown"])
        await pair.proxy.resume()
        return await task

    completion = pair.run(abort_at_once())
    assert (completion.tokens, completion.finish_reason) == ([], "aborted")


def test_an_aborted_request_returns_the_tokens_that_it_has(pair):
    async def abort_soon():
        tasks = [
            asyncio.create_task(pair.proxy.generate(f"ab-{i}", PROMPT, seed=i)) for i in range(16)
        ]
        await asyncio.sleep(0.02)
        await pair.proxy.abort([f"ab-{i}" for i in range(16)])
        return await asyncio.gather(*tasks)

    aborted = [c for c in pair.run(abort_soon()) if c.finish_reason == "aborted"]
    assert aborted
    for completion in aborted:
        assert (
            len(completion.tokens)
            == len(completion.behavior_logprobs)
            == len(completion.policy_versions)
            < 100
        )
        assert np.isfinite(completion.behavior_logprobs).all()


def test_weights_that_are_not_whole_are_refused(pair):
    (message,) = pair.stage(9).messages
    with pytest.raises(Exception, match="checksum"):
        pair.run(pair.proxy.update(9, [message | {"checksum": message["checksum"] + 1}]))


def test_vllms_nccl_engine_understands_what_the_transport_tells_it():
    from vllm.distributed.weight_transfer.nccl_engine import (
        NCCLWeightTransferInitInfo,
        NCCLWeightTransferUpdateInfo,
    )

    specs = [ParameterSpec("w", torch.bfloat16, (2, 3))]
    transport = NcclTransport(specs, torch.device("cpu"), 2, 1.0, SocketLink)
    told = NCCLWeightTransferInitInfo(**transport.init_info())
    transport.close()
    (message,) = transport.stage(0, [("w", torch.zeros(2, 3))]).messages
    NCCLWeightTransferUpdateInfo(**message)
    assert (told.rank_offset, told.world_size) == (1, 3)
    assert told.packed is True and told.packed_buffer_size_bytes == CHUNK_BYTES


class CalledEngine:
    """The control calls of vLLM; writes down what it is asked, in order."""

    def __init__(self, stuck=False):
        self.engine_core, self.asked, self.stuck = self, [], stuck

    async def pause_scheduler_async(self, mode, clear_cache):
        self.asked.append("pause")

    async def sleep(self, level, mode):
        self.asked.append(f"sleep {level}")

    async def wake_up(self):
        self.asked.append("wake up")

    async def start_weight_update(self):
        self.asked.append("start")
        await asyncio.sleep(60 if self.stuck else 0)

    async def update_weights(self, request):
        self.asked.append(request.update_info)

    async def finish_weight_update(self):
        self.asked.append("finish")

    async def update_weight_version(self, version):
        self.asked.append(f"stamp {version}")
        self.version = version

    async def resume_generation(self):
        self.asked.append("resume")


def test_the_phases_of_an_update_are_asked_for_in_their_order_and_the_version_is_stamped_before_sampling_goes_on():
    engine = CalledEngine()
    proxy = LLMProxy(Config(), engine, [])
    asyncio.run(proxy.update(7, [{"a": 1}, {"a": 2}]))
    assert engine.asked == ["pause", "start", {"a": 1}, {"a": 2}, "finish", "stamp 7", "resume"]


class BrokenEngine(CalledEngine):
    """Cannot load."""

    async def update_weights(self, request):
        raise RuntimeError("no such buffer")


def test_sampling_does_not_go_on_after_an_update_that_failed():
    engine = BrokenEngine()
    with pytest.raises(RuntimeError, match="no such buffer"):
        asyncio.run(LLMProxy(Config(), engine, []).update(0, [{"a": 1}]))
    assert "resume" not in engine.asked


def test_an_engine_that_sleeps_is_woken_before_it_is_told_to_receive_and_only_then():
    engine = CalledEngine()
    proxy = LLMProxy(Config(on_update="resume"), engine, [])

    async def updates():
        await proxy.update(0, [{"a": 1}])
        await proxy.sleep()
        return await proxy.update(1, [{"a": 2}, {"a": 3}], lambda: engine.asked.append("receiving"))

    assert asyncio.run(updates()) == 0.0, "nobody sampled meanwhile"
    first = ["pause", "start", {"a": 1}, "finish", "stamp 0", "resume"]
    second = [
        "pause",
        "sleep 2",
        "wake up",
        "start",
        "receiving",
        {"a": 2},
        {"a": 3},
        "finish",
        "stamp 1",
        "resume",
    ]
    assert engine.asked == first + second and proxy.version == 1


def test_an_update_that_does_not_end_is_an_error_that_names_it():
    proxy = LLMProxy(Config(timeout_s=0.1), CalledEngine(stuck=True), [])
    with pytest.raises(TimeoutError, match="loading version 3 took more than 0 s"):
        asyncio.run(proxy.update(3, [{}]))


@pytest.mark.parametrize("is_stopped", [True, False])
def test_an_engine_that_is_stopped_while_it_samples_is_an_error_and_one_that_samples_is_none(
    pair, is_stopped
):
    (engine,) = pair.proxy.engine.engine_core.resources.engine_manager.processes
    before, pair.proxy.config = pair.proxy.config, replace(pair.proxy.config, timeout_s=2.0)

    async def watch():
        response = asyncio.create_task(pair.proxy.generate("stopped", PROMPT, seed=1))
        await asyncio.sleep(0.01)
        if is_stopped:
            os.kill(engine.pid, signal.SIGSTOP)
        try:
            await asyncio.wait_for(pair.proxy.watch(), 8)
        finally:
            os.kill(engine.pid, signal.SIGCONT)
            await response

    pair.sync(1)
    try:
        with pytest.raises(TimeoutError) as raised:
            pair.run(watch())
        assert ("an answer of the engine took more than 2 s" in str(raised.value)) == is_stopped
    finally:
        pair.proxy.config = before


class SamplingEngine(CalledEngine):
    """Writes down requests too, and ends each at once with one token of the version that it was told last."""

    async def generate(self, prompt, params, request_id):
        self.asked.append("request")
        spans = [SimpleNamespace(version=self.version, start=0, end=1)]
        stamped = {"logprobs": SimpleNamespace(logprobs=[-1.0]), "weight_versions": spans}
        output = SimpleNamespace(index=0, token_ids=[5], finish_reason="stop", **stamped)
        yield SimpleNamespace(finished=True, outputs=[output])


@pytest.mark.parametrize("as_group", [False, True])
def test_a_response_woken_by_an_update_that_a_suspend_follows_at_once_waits_for_the_next(as_group):
    engine = SamplingEngine()
    proxy = LLMProxy(Config(), engine, [])

    async def wake_and_suspend():
        await proxy.suspend()
        response = (
            generate_group(proxy, "r", PROMPT, 1, 1) if as_group else proxy.generate("r", PROMPT, 1)
        )
        response = asyncio.create_task(response)
        await asyncio.sleep(0)
        await proxy.update(1, [{}])
        await proxy.suspend()
        await asyncio.sleep(0.05)
        assert "request" not in engine.asked
        await proxy.update(2, [{}])
        return await asyncio.wait_for(response, 5)

    completion = asyncio.run(wake_and_suspend())
    completion = completion[0] if as_group else completion
    assert completion.policy_versions.tolist() == [2] and engine.asked[-2:] == ["resume", "request"]
