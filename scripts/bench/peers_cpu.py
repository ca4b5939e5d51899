"""What TRL 1.16 lacks to run without a GPU, and forced lengths for its two ways to generate; see peers.py.

Each replacement is the fastest that we have. Runs in the peers' own environment.
"""

import copy
import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import torch
from torch import Tensor
from trl.experimental.async_grpo import async_grpo_trainer, async_rollout_worker, packing
from trl.experimental.async_grpo.vllm_client import VLLMClient

from asyncrl.weights.shm import ShmTransport
from asyncrl.weights.transport import ParameterSpec
from scripts.bench.workloads import Workload, workload_of


def use_no_gpu(attention: Callable[..., Tensor]) -> None:
    """Give the asynchronous trainer, whose packed attention is a CUDA kernel, another one, and measure no GPU."""
    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=attention)
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None


class ShmWeightTransfer:
    """Weights of the asynchronous trainer through shared host memory, as ours: NCCL needs GPUs.

    TRL's `WeightTransferProtocol`. `named_parameters` must be set before training begins.
    """

    def __init__(self, server_url: str):
        self.client = VLLMClient(server_url)
        self.pause, self.resume = self.client.pause, self.client.resume
        self.named_parameters: Callable[[], Iterator[tuple[str, Tensor]]] | None = None
        self._versions = itertools.count()

    def init_weight_transfer(self) -> None:
        self._transport = ShmTransport(
            [ParameterSpec(name, p.dtype, tuple(p.shape)) for name, p in self.named_parameters()]
        )
        self.client.wait_for_server_ready()
        self.client.init_weight_transfer_engine(self._transport.init_info())

    def send_weights(self, iterator: Iterator[tuple[str, Tensor]]) -> None:
        staged = self._transport.stage(next(self._versions), iterator)
        self.client.start_weight_update()
        for message in staged.messages:
            self.client.update_weights(message)
        self.client.finish_weight_update()
        self._transport.announce(staged)

    def destroy(self) -> None:
        pass


def force_generate(model, workload: Workload, eos_token_id: int) -> None:
    """Have transformers' generate end each response by an end of sequence at its forced length."""
    sample, seeds = model.generate, itertools.count()

    def generate(*, input_ids: Tensor, attention_mask: Tensor, generation_config) -> Tensor:
        lengths = torch.tensor([workload.length(next(seeds)) for _ in input_ids])
        options = copy.deepcopy(generation_config)
        options.max_new_tokens, options.suppress_tokens = int(lengths.max()), [eos_token_id]
        tokens = sample(
            input_ids=input_ids, attention_mask=attention_mask, generation_config=options
        )
        tokens[torch.arange(len(tokens)), input_ids.shape[1] + lengths - 1] = eos_token_id
        return tokens

    model.generate = generate


class ForcedLoop(async_rollout_worker._AsyncRolloutLoop):
    """The asynchronous trainer's rollout with forced lengths."""

    async def _post(self, path: str, payload: dict, *arguments, **options) -> dict:
        length = workload_of(self.max_tokens).length(payload["seed"])
        forced = {"max_tokens": length, "ignore_eos": True}
        return await super()._post(path, payload | forced, *arguments, **options)


def force_async() -> None:
    """Have the asynchronous trainer's requests ask for forced lengths."""
    async_rollout_worker.AsyncRolloutWorker._loop_cls = ForcedLoop
