"""The engine as the worker uses it: real vLLM on the CPU, against the trainer's own forward."""

import asyncio
import os

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tiny_policy import VOCAB, load, save_tiny_model

from config import Config
from packing import TrainSequence
from placement import WorkerPlacement
from rollout import LLMProxy, WorkerSpec, worker_environment
from weight_sync import ParameterSpec, ShmTransport

PROMPT = tuple(range(3, 13))
LONG_PROMPT = tuple(np.random.default_rng(0).integers(3, VOCAB, 150).tolist())


class Pair:
    """A trainer's policy and an engine, joined by the shm transport."""

    def __init__(self, config):
        self.config = config
        self.policy = load(config)
        specs = [ParameterSpec(n, torch.float32, tuple(p.shape)) for n, p in self.policy.named_full_parameters()]
        self.transport = ShmTransport(specs)
        self.loop = asyncio.new_event_loop()
        spec = WorkerSpec(config, WorkerPlacement(0, None, None, 1, 0.0), config.model, "shm", "")
        self.proxy = self.run(LLMProxy.start(spec, stop_token_ids=[]))
        self.run(self.proxy.connect(self.transport.init_info()))
        self.sync(0)

    def run(self, coroutine):
        return self.loop.run_until_complete(asyncio.wait_for(coroutine, 60))

    def perturb(self):
        """Move every weight of the trainer, as a step would."""
        with torch.no_grad():
            for parameter in self.policy.module.parameters():
                parameter.mul_(1.0 + 0.2 * torch.rand_like(parameter))

    def weights(self):
        return [parameter.detach().clone() for parameter in self.policy.module.parameters()]

    def restore(self, weights):
        with torch.no_grad():
            for parameter, saved in zip(self.policy.module.parameters(), weights, strict=True):
                parameter.copy_(saved)

    def stage(self, version):
        return self.transport.stage(version, self.policy.named_full_parameters())

    def sync(self, version):
        staged = self.stage(version)
        return self.run(self.proxy.update(version, staged.messages))

    def generate(self, name, prompt=PROMPT, seed=1):
        return self.run(self.proxy.generate(name, prompt, seed))

    def trainer_logprobs(self, prompt, tokens, raw=False):
        whole = np.array([*prompt, *tokens])
        mask = np.arange(len(whole)) >= len(prompt)
        unused = np.zeros(len(whole), np.float32)
        sequence = TrainSequence(whole, mask, unused, np.zeros(len(whole), np.int32), 0.0, 0.0)
        return self.policy.score([[sequence]], raw=raw)[0].numpy()


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    torch.set_num_threads(1)
    before = dict(os.environ)
    os.environ.update(worker_environment(WorkerPlacement(0, None, None, 1, 0.0)))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    path = save_tiny_model(str(tmp_path_factory.mktemp("model")))
    pair = Pair(Config(model=path, temperature=0.7, top_p=0.9, max_prompt_tokens=200, max_response_tokens=100, lr=1e-3))
    yield pair
    pair.proxy.shutdown()
    dist.destroy_process_group()
    os.environ.clear()
    os.environ.update(before)


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


def test_behavior_logprobs_are_the_trainers_under_temperature_and_top_p(pair):
    completion = pair.generate("sampled")
    assert len(completion.tokens) > 1 and len(completion.logprobs) == len(completion.tokens)
    trainer = pair.trainer_logprobs(PROMPT, completion.tokens)
    assert np.abs(completion.logprobs - trainer).max() < 1e-4
    raw = pair.trainer_logprobs(PROMPT, completion.tokens, raw=True)
    assert np.abs(completion.logprobs - raw).max() > 1e-2


def test_the_same_seed_draws_the_same_response_and_another_seed_another(pair):
    first, again, other = (pair.generate(f"seed-{i}", seed=seed) for i, seed in enumerate((5, 5, 6)))
    assert first.tokens == again.tokens != other.tokens


def test_a_prefix_computed_under_other_weights_is_never_reused(pair):
    for name, version in (("before", 2), ("after", 3)):
        pair.perturb()
        pair.sync(version)
        completion = pair.generate(f"prefix-{name}", LONG_PROMPT)
        trainer = pair.trainer_logprobs(LONG_PROMPT, completion.tokens)
        assert np.abs(completion.logprobs - trainer).max() < 1e-4


def test_an_update_in_the_middle_of_responses_stamps_every_token_with_its_version(pair):
    async def generate_through_updates():
        tasks = [asyncio.create_task(pair.proxy.generate(f"mid-{i}", PROMPT, seed=100 + i)) for i in range(32)]
        for version in (4, 5):
            await asyncio.sleep(0.03)
            pair.perturb()
            await pair.proxy.update(version, pair.stage(version).messages)
        return await asyncio.gather(*tasks)

    start, weights = pair.proxy.version, pair.weights()
    completions = pair.run(generate_through_updates())
    lived_through = [c for c in completions if len(set(c.versions)) > 1]
    assert lived_through, "no response was running during an update"
    pair.restore(weights)
    for completion in lived_through:
        assert list(completion.versions) == sorted(completion.versions)
        assert set(completion.versions) <= {start, 4, 5}
        first = completion.versions == start  # later tokens saw the old version's KV cache, as `keep` says
        trainer = pair.trainer_logprobs(PROMPT, completion.tokens)
        assert np.abs(completion.logprobs - trainer)[first].max(initial=0.0) < 1e-4
    assert any(np.abs(c.logprobs - pair.trainer_logprobs(PROMPT, c.tokens)).max() > 1e-2 for c in lived_through)


def test_an_aborted_request_returns_the_tokens_that_it_has(pair):
    async def abort_soon():
        tasks = [asyncio.create_task(pair.proxy.generate(f"ab-{i}", PROMPT, seed=i)) for i in range(16)]
        await asyncio.sleep(0.02)
        await pair.proxy.abort([f"ab-{i}" for i in range(16)])
        return await asyncio.gather(*tasks)

    aborted = [c for c in pair.run(abort_soon()) if c.finish_reason == "aborted"]
    assert aborted
    for completion in aborted:
        assert len(completion.tokens) == len(completion.logprobs) == len(completion.versions) < 100
        assert np.isfinite(completion.logprobs).all()


def test_weights_that_are_not_whole_are_refused(pair):
    (message,) = pair.stage(9).messages
    with pytest.raises(Exception, match="checksum"):
        pair.run(pair.proxy.update(9, [message | {"checksum": message["checksum"] + 1}]))
