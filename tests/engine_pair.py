"""A trainer's policy and a real engine side by side, for tests of what the two must agree on."""

import asyncio
import dataclasses
import functools
import gc
from contextlib import closing, contextmanager

import numpy as np
import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from tiny_policy import load

from asyncrl.cluster.placement import WorkerPlacement, WorkerSpec
from asyncrl.engine.in_flight import output_so_far
from asyncrl.engine.proxy import LLMProxy
from asyncrl.engine.vllm_setup import worker_environment
from asyncrl.trainer.packing import TrainSequence
from asyncrl.weights.shm import ShmTransport

PROMPT = tuple(range(3, 13))
PLACEMENT = WorkerPlacement(0, None, None, 1, 0.0)


@contextmanager
def start_pair(config, *arguments, patches=()):
    """Yield a Pair, which ends with its process group. Each of the patches is called before the engine is forked."""
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in worker_environment(PLACEMENT).items():
            patch.setenv(name, value)
        for apply in patches:
            apply(patch)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            with closing(Pair(config, *arguments)) as pair:
                yield pair
        finally:
            dist.destroy_process_group()


def sequence_of(prompt, response, experts=None):
    """A sequence of which the response is scored."""
    tokens = np.array([*prompt, *response])
    sequence = TrainSequence.to_score(tokens, np.arange(len(tokens)) >= len(prompt))
    return dataclasses.replace(sequence, experts=experts)


class Pair:
    """A trainer's policy and an engine, joined by the shm transport or another one."""

    def __init__(self, config, transport="shm", make_transport=ShmTransport):
        self.config, self.sends = config, transport == "nccl"
        self.policy = load(config)
        self.transport = make_transport(self.policy.sent_specs())
        self.loop = asyncio.new_event_loop()
        spec = WorkerSpec(config, PLACEMENT, config.model, transport, "")
        # the engine is forked, and dies if it collects a gloo group that another test's thread still holds
        gc.freeze()
        # If an earlier test has compiled anything, the fork would wait for compiler threads that it does not have.
        with torch._dynamo.config.patch(disable=True):
            self.proxy = self.run(LLMProxy.start(spec, stop_token_ids=[]))
        gc.unfreeze()
        self.run(self.proxy.connect(self.transport.init_info()))
        self.sync(0)

    def run(self, coroutine):
        return self.loop.run_until_complete(asyncio.wait_for(coroutine, 60))

    def close(self):
        """End the engine, whose sockets are closed while its loop runs: open ones hang their collection."""
        self.proxy.shutdown()
        self.run(asyncio.sleep(0.1))
        if self.sends:
            self.transport.close()  # or its thread would outlive the tests

    def perturb(self):
        """Move every weight of the trainer, as a step would."""
        with torch.no_grad():
            for parameter in self.policy.module.parameters():
                parameter.mul_(1.0 + 0.4 * (torch.rand_like(parameter) - 0.5))

    def weights(self):
        return [parameter.detach().clone() for parameter in self.policy.module.parameters()]

    @contextmanager
    def having(self, weights):
        """The trainer has these weights for a while."""
        now = self.weights()
        self.restore(weights)
        yield
        self.restore(now)

    def restore(self, weights):
        with torch.no_grad():
            for parameter, saved in zip(self.policy.module.parameters(), weights, strict=True):
                parameter.copy_(saved)

    def stage(self, version):
        return self.transport.stage(version, self.policy.sent_parameters())

    def sync(self, version):
        return self.load(version, self.policy.sent_parameters())

    def load(self, version, parameters):
        """Have the engine load these as a version."""
        staged = self.transport.stage(version, parameters)
        receiving = functools.partial(self.transport.send, 0, staged) if self.sends else None
        return self.run(self.proxy.load_weights(version, staged.messages, receiving))

    @contextmanager
    def options(self, **options):
        """Sample, and score in the trainer, with these options."""
        configs = self.proxy.config, self.policy.config
        self.proxy.config, self.policy.config = (
            dataclasses.replace(config, **options) for config in configs
        )
        yield
        self.proxy.config, self.policy.config = configs

    def lengths(self):
        """Tokens so far of every request that runs, by its name in the engine."""
        states = self.proxy.engine.output_processor.request_states
        return {name: len(output_so_far(state).token_ids) for name, state in states.items()}

    async def until_grown(self, num_tokens, tasks):
        """Wait until a request has so many tokens more, or all tasks have ended."""
        before = self.lengths()
        while not all(task.done() for task in tasks):
            grown = [num - before.get(name, 0) for name, num in self.lengths().items()]
            if max(grown, default=0) >= num_tokens:
                return
            await asyncio.sleep(0.002)

    def run_through_updates(self, start, num_updates=3):
        """What coroutines return that several updates interrupt, and the weights of every version they can have.

        `start()` makes the coroutines, when the engine may be used.
        """
        weights = {self.proxy.version: self.weights()}

        async def run():
            tasks = [asyncio.create_task(coroutine) for coroutine in start()]
            for version in range(self.proxy.version + 1, self.proxy.version + 1 + num_updates):
                await self.until_grown(8, tasks)
                self.perturb()
                weights[version] = self.weights()
                await self.proxy.load_weights(version, self.stage(version).messages)
            return await asyncio.gather(*tasks)

        return self.run(run()), weights

    def gaps(self, completion, weights, prompt=PROMPT):
        """[R] nats: between the engine's log-prob of each token and the trainer's under the version that it claims."""
        trainer = np.full(len(completion.tokens), np.nan)
        for version in set(completion.policy_versions.tolist()):
            is_sampled = completion.policy_versions == version
            with self.having(weights[version]):
                trainer[is_sampled] = self.trainer_logprobs(prompt, completion.tokens)[is_sampled]
        return np.abs(completion.behavior_logprobs - trainer)

    def generate(self, name, prompt=PROMPT, seed=1):
        return self.run(self.proxy.generate(name, prompt, seed, self.config.max_response_tokens))

    def trainer_logprobs(self, prompt, tokens, raw=False):
        return self.policy.logprobs_of([[sequence_of(prompt, tokens)]], raw=raw)[0].numpy()
