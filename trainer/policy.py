"""The trained model: load, FSDP2, loss of packed tokens, optimizer update.

Trained weights are float32 masters. A GPU computes in bfloat16 (FSDP2 mixed precision, float32 gradient reduction), the
CPU in float32; what is frozen beside adapters is kept in that dtype. trainer/attention.py says with which attention.
Methods marked «collective» must be called by all ranks with the same number of micro-batches.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from algos import KL_ESTIMATORS, LOSSES, LossInputs, hyperparameters
from algos.kl import k3
from algos.proximal import loglinear
from algos.ratio import importance_ratio
from config import Config
from records.time_ledger import TrainerClock
from trainer.attention import check_shares_prefix, choose_attention
from trainer.checkpoint import try_write
from trainer.lag_stats import TokenStats
from trainer.logprobs import TokenLogprobs
from trainer.lora import add_adapters, initial_adapters, merged, named_adapters, named_base_parameters, without_adapters
from trainer.packing import MicroBatch, TrainSequence, pack, token_weights
from weights.transport import ParameterSpec

_UNSUPPORTED_HEADS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")


@dataclass(frozen=True)
class StepPosition:
    """Where the weights are between two versions."""

    policy_version: int
    """Version at the start of the step, steps."""
    progress: float
    """Share of the step's optimizer updates that were made, in [0, 1)."""


class Policy:
    """The model, its optimizer and the loss; every rank holds its shard."""

    def __init__(
        self,
        config: Config,
        model_path: str,
        module: TokenLogprobs,
        reference: TokenLogprobs | None,
        loss: Callable,
        device: torch.device,
        clock: TrainerClock | None = None,
    ) -> None:
        self.config = config
        self.model_path = model_path
        self.module = module
        self.reference = reference
        self.loss = loss
        self.device = device
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=config.lr, weight_decay=config.weight_decay)
        self.num_updates = 0
        self.clock = clock or TrainerClock()

    @property
    def attention(self) -> str:
        """Attention implementation in use: flash_attention_2 or sdpa."""
        return self.module.model.config._attn_implementation

    @property
    def one_row(self) -> bool:
        """Whether its attention wants each micro-batch packed into one row."""
        return self.module.one_row

    @property
    def lr(self) -> float:
        """Learning rate of the next update: linear warm-up, then constant."""
        return self.config.lr * min(1.0, (self.num_updates + 1) / max(1, self.config.warmup))

    def train_step(self, updates: list[list[list[TrainSequence]]], policy_version: int) -> dict[str, float]:
        """Make the optimizer updates of one step on this rank's share, [update][micro-batch] → sequences; collective.

        `policy_version` is that of the weights now. Returns, equal on all ranks: `loss` and `grad_norm` (before
        clipping), means over the updates; `lr` of the last; `tokens/forward` and `tokens/saved_share`; and the means of
        TokenStats over all trained tokens.
        Raises RuntimeError for a non-finite loss or gradient, for an update without a trained token, and for a token
        from the future.
        """
        self.clock.enter("forward_backward")
        packed = [[self._pack(sequences, policy_version) for sequences in update] for update in updates]
        anchors = [[None] * len(update) for update in packed]
        if len(packed) > 1 and self.config.proximal == "recompute":
            with torch.no_grad():
                anchors = [[self._forward(self.module, batch)[0] for batch in update] for update in packed]
        stats = TokenStats()
        results = [
            self._update(update, anchor, StepPosition(policy_version, i / len(packed)), stats)
            for i, (update, anchor) in enumerate(zip(packed, anchors, strict=True))
        ]
        mean = {name: sum(r[name] for r in results) / len(results) for name in ("loss", "grad_norm")}
        return {**mean, "lr": results[-1]["lr"], **self._tokens_read(packed), **stats.reduce(), **self._memory()}

    def _tokens_read(self, packed: list[list[MicroBatch]]) -> dict[str, float]:
        """Tokens that one pass over the step reads, on all ranks, and the share that shared prompts saved."""
        batches = [batch for update in packed for batch in update]
        counts = [float(sum(b.num_read for b in batches)), float(sum(b.num_unshared for b in batches))]
        read, unshared = self._sum_over_ranks(torch.tensor(counts, dtype=torch.float64)).tolist()
        return {"tokens/forward": read, "tokens/saved_share": 1 - read / unshared}

    def _memory(self) -> dict[str, float]:
        """Most memory that tensors held on this rank's GPU so far; nothing on the CPU."""
        return {} if self.device.type == "cpu" else {"memory/peak_gib": torch.cuda.max_memory_allocated() / 2**30}

    @torch.no_grad()
    def score(self, microbatches: list[list[TrainSequence]], raw: bool = False) -> list[Tensor]:
        """Return log-probs of the trained tokens of each micro-batch, flat [N] float32 nats on the CPU; collective.

        Token order is that of the sequences given. `raw` leaves the sampling transform out (temperature 1, top_p 1).
        """
        packed = [pack(sequences, self.module.one_row, self.config.share_prefix) for sequences in microbatches]
        return [self._forward(self.module, batch.to(self.device), raw)[0].cpu() for batch in packed]

    def named_full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, full float32 tensor) one at a time, tied weights once, in fixed order; collective.

        Adapters are merged into the weights they belong to. Copy each before taking the next: on one rank it is the
        live weight.
        """
        for name, parameter in named_base_parameters(self.module.model):
            yield name, merged(self.module.model, name, parameter.detach().full_tensor())

    def sent_specs(self) -> list[ParameterSpec]:
        """How the full parameters are sent to rollout, in the same order: in the dtype that the model computes in."""
        dtype = torch.float32 if self.device.type == "cpu" else torch.bfloat16
        return [ParameterSpec(name, dtype, tuple(p.shape)) for name, p in named_base_parameters(self.module.model)]

    def save(self, path: str) -> None:
        """Write a Hugging Face checkpoint (safetensors, config, tokenizer) to the new folder `path`; collective.

        With LoRA the weights are the merged ones, and the adapter is beside them in `path`/adapter, in peft's format.
        Raises OSError on every rank if it cannot be written; then nothing is left under `path`.
        """
        model, failure = self.module.model, [None]
        state = _copies_on_rank_0(self.named_full_parameters())
        adapters = _copies_on_rank_0((name, p.detach().full_tensor()) for name, p in named_adapters(model))
        if dist.get_rank() == 0:
            failure = [try_write(model, self.model_path, state, adapters, path)]
        dist.broadcast_object_list(failure, src=0, device=self.device)
        if failure[0]:
            raise OSError(failure[0])

    def _pack(self, sequences: list[TrainSequence], policy_version: int) -> MicroBatch:
        batch = pack(sequences, self.module.one_row, self.config.share_prefix)
        newest = max(batch.policy_versions.tolist(), default=policy_version)
        if newest > policy_version:
            raise RuntimeError(
                f"a token was sampled by version {newest}, but the trainer is at version {policy_version}: "
                "versions are stamped or published wrongly"
            )
        return batch.to(self.device)

    def _forward(self, module: TokenLogprobs, batch: MicroBatch, raw: bool = False) -> tuple[Tensor, Tensor]:
        """Log-probs and entropy [N] of the trained tokens."""
        temperature, top_p = (1.0, 1.0) if raw else (self.config.temperature, self.config.top_p)
        inputs = (batch.input_ids, batch.position_ids, batch.sources, batch.targets)
        scored = module(*inputs, temperature, top_p, batch.segment_ids, batch.prefix_ids)
        if not torch.is_grad_enabled():
            module.reshard()  # FSDP keeps the root's weights gathered, for a backward pass that does not come
        return scored

    def _update(
        self, batches: list[MicroBatch], anchors: list[Tensor | None], position: StepPosition, stats: TokenStats
    ) -> dict[str, float]:
        """Make one optimizer update; return its loss, grad_norm and lr."""
        totals = [sum(sum(b.num_trained) for b in batches), sum(len(b.num_trained) for b in batches)]
        total_tokens, total_sequences = self._sum_over_ranks(torch.tensor(totals, dtype=torch.float64)).tolist()
        if not total_tokens:
            raise RuntimeError("an update got no trained token on any rank: every loss mask is empty")
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        for batch, anchor in zip(batches, anchors, strict=True):
            per_token_loss = self._per_token_loss(batch, anchor, position, stats)
            summed = (per_token_loss * self._weights(batch, total_tokens, total_sequences)).sum()
            # FSDP averages gradients over ranks, but the weights are global already: undo the average.
            (summed * dist.get_world_size()).backward()
            loss += summed.detach()
        return self._step(float(self._sum_over_ranks(loss)))

    def _weights(self, batch: MicroBatch, total_tokens: float, total_sequences: float) -> Tensor:
        """Weight [N] of each trained token in the summed loss of the update."""
        of_sequence = token_weights(
            list(batch.num_trained),
            self.config.loss_aggregation,
            total_tokens,
            total_sequences,
            self.config.max_response_tokens,
        )
        return torch.tensor(of_sequence, dtype=torch.float32, device=self.device)[batch.sequence_ids]

    def _per_token_loss(
        self, batch: MicroBatch, anchor: Tensor | None, position: StepPosition, stats: TokenStats
    ) -> Tensor:
        """Loss [N] of each trained token, KL penalty included; its stats go to `stats`.

        `anchor`: proximal log-probs [N], or None to derive them from `logprobs`.
        """
        if self.reference is not None:
            with torch.no_grad(), without_adapters(self.reference):
                ref_logprobs, _ = self._forward(self.reference, batch)
        logprobs, entropy = self._forward(self.module, batch)
        if not len(batch.targets):
            return logprobs  # [0], but in the graph: this rank's FSDP collectives must still run backwards
        behavior, lags = batch.behavior_logprobs, position.policy_version - batch.policy_versions
        if anchor is None:
            # Before the first update the proximal policy is the current one, so with one update this is exact.
            anchor = loglinear(logprobs, behavior, lags, position.progress)
        loss, loss_stats = self.loss(
            LossInputs(logprobs, behavior, anchor, batch.advantages, batch.rewards, batch.sequence_ids)
        )
        token_stats = _drift(logprobs.detach(), behavior) | {"entropy": entropy} | loss_stats
        if self.reference is not None:
            kl = KL_ESTIMATORS[self.config.kl_estimator](logprobs, ref_logprobs, behavior)
            loss = loss + self.config.kl_coef * kl
            token_stats["kl_ref"] = kl.detach()
        stats.add(token_stats, lags)
        return loss

    def _step(self, loss: float) -> dict[str, float]:
        """Clip the gradient and step the optimizer; refuses what is not finite before it touches a weight."""
        self.clock.enter(
            "optimizer"
        )  # reading `loss` has just waited for the device, so the host's time is the device's
        norm = nn.utils.clip_grad_norm_(self.module.parameters(), self.config.max_grad_norm)
        grad_norm = float(norm.full_tensor())
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            raise RuntimeError(
                f"loss {loss} and gradient norm {grad_norm} at update {self.num_updates} must be finite: "
                "look at the rewards, the behavior log-probs and the learning rate"
            )
        lr = self.lr
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.num_updates += 1
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # costs no overlap: the next thing the host does is to read a sum
        self.clock.enter("forward_backward")
        return {"loss": loss, "grad_norm": grad_norm, "lr": lr}

    def _sum_over_ranks(self, values: Tensor) -> Tensor:
        values = values.to(self.device)
        dist.all_reduce(values)
        return values


def _copies_on_rank_0(parameters: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Copies in host memory by name on rank 0; the others only help to gather."""
    copies = {}
    for name, tensor in parameters:
        if dist.get_rank() == 0:
            copies[name] = tensor.to("cpu", copy=True)
    return copies


def _drift(logprobs: Tensor, behavior_logprobs: Tensor) -> dict[str, Tensor]:
    """How far the current policy is from the one that sampled, per token [N]: k1, k3 (nats) and the ratio.

    Estimators of KL(behavior ‖ current) from samples of behavior: Schulman, «Approximating KL divergence», 2020.
    """
    log_ratio = logprobs - behavior_logprobs
    return {
        "drift/k1": -log_ratio,
        "drift/k3": k3(behavior_logprobs, logprobs, behavior_logprobs),
        "ratio": importance_ratio(log_ratio),
    }


def load_policy(config: Config, model_path: str, device: torch.device, clock: TrainerClock | None = None) -> Policy:
    """Load the model of a folder on `device`, sharded over all ranks; collective, in an initialised process group.

    With kl_coef > 0 a second, frozen copy is the reference, or with LoRA the model itself without its adapters. Raises
    ValueError, at once, for a missing or unfit model and for an argument that the loss does not take.
    """
    options = hyperparameters(config.algo, config.algo_args)
    mesh = trainer_mesh(config.replicas, device)
    module, reference = _load_sharded(config, model_path, mesh, device), None
    if config.kl_coef > 0 and config.lora_rank:
        reference = module
    elif config.kl_coef > 0:
        interpreted = dataclasses.replace(config, compile=False)  # compile_layers says why
        reference = _load_sharded(interpreted, model_path, mesh, device).requires_grad_(False)
    loss = functools.partial(LOSSES[config.algo], **options)
    return Policy(config, model_path, module, reference, loss, device, clock)


def trainer_mesh(replicas: int, device: torch.device) -> DeviceMesh:
    """All ranks as one line over which the model is sharded, or as `replicas` lines of neighbours (HSDP); collective.

    torchrun numbers the ranks node by node: with a replica per node, weights are gathered within nodes only.
    """
    num_ranks = dist.get_world_size()
    if replicas == 1:
        return init_device_mesh(device.type, (num_ranks,))
    shape = (replicas, num_ranks // replicas)
    return init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))


transformers_logging.disable_progress_bar()  # loading and saving would draw over ours


def _load_sharded(config: Config, path: str, mesh: DeviceMesh, device: torch.device) -> TokenLogprobs:
    """Build an empty sharded model on every rank, then fill it from rank 0, who alone reads the weights."""
    hf_config = _read_config(path)
    if config.share_prefix:
        check_shares_prefix(hf_config, path)
    compute_dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    dtype = compute_dtype if config.lora_rank else torch.float32
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            hf_config,
            dtype=dtype,
            attn_implementation=choose_attention(device, config.share_prefix),
            trust_remote_code=False,
        )
    module = TokenLogprobs(model.eval())
    layers = [layer for layer in model.modules() if type(layer).__name__ in model._no_split_modules]
    if config.lora_rank:
        add_adapters(model, layers, config.lora_rank)
    if "activations" in config.save_memory:
        recompute_layers(model, layers)
    if config.compile:
        compile_layers(layers)
    shard([*layers, module], mesh, compute_dtype, "optimizer" in config.save_memory)
    module.to_empty(device="cpu" if "optimizer" in config.save_memory else device)
    _move_buffers(model, device)
    _fill_from_rank_0(model, path, dtype, config.seed)
    return module


def _read_config(path: str) -> PreTrainedConfig:
    hf_config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    for name in _UNSUPPORTED_HEADS:
        if getattr(hf_config, name, None) not in (None, 1.0):
            raise ValueError(
                f"--model {path}: its head uses {name} = {getattr(hf_config, name)}, which we do not apply"
            )
    return hf_config


def _move_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Put buffers where layers compute: FSDP streams offloaded weights there by itself, but not these."""
    for owner in model.modules():
        for name, buffer in list(owner.named_buffers(recurse=False)):
            setattr(owner, name, buffer.to(device))


def _fill_from_rank_0(model: PreTrainedModel, path: str, dtype: torch.dtype, seed: int) -> None:
    """Read a checkpoint on rank 0 and give every rank its shard of the weights, and the buffers whole.

    Adapters, which no checkpoint of a base model holds, are made from the seed.
    """
    is_reader = dist.get_rank() == 0
    full = _read_model(path, dtype) if is_reader else None
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    state = full.state_dict() | initial_adapters(model, seed) if is_reader else {}
    set_model_state_dict(model, state, options=options)
    for name, buffer in model.named_buffers():  # rotary frequencies and the like, which no state dict holds
        if is_reader:
            buffer.copy_(full.get_buffer(name))
        dist.broadcast(buffer, src=0)


def _read_model(path: str, dtype: torch.dtype) -> PreTrainedModel:
    options = {"use_safetensors": True, "trust_remote_code": False}
    # Shapes that differ are taken, and refused here: transformers would only point at a table printed before.
    options |= {"ignore_mismatched_sizes": True, "output_loading_info": True}
    full, info = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **options)
    for name, found, expected in sorted(info["mismatched_keys"]):
        raise ValueError(
            f"--model {path}: {name} is {list(found)} in its safetensors and {list(expected)} by its config.json; "
            "the two are not of one model"
        )
    return full


def recompute_layers(model: PreTrainedModel, layers: list[nn.Module]) -> None:
    """Keep only each layer's input for the backward pass and compute the rest again: memory for time."""
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in layers:
        layer.training = True  # transformers asks this flag of the layer; its children stay in eval mode: no dropout


def compile_layers(layers: list[nn.Module]) -> None:
    """Compile each layer's forward, without FSDP's hooks and the recomputation around it.

    Layers share their code and so their graphs: one per kind of input (one row or more, masked or not, with gradient or
    without). Past eight of them torch warns and runs a layer uncompiled; so sizes are symbolic, and a reference model,
    whose frozen weights make other kinds, is not compiled.
    """
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=True)


def shard(modules: list[nn.Module], mesh: DeviceMesh, compute_dtype: torch.dtype, offload: bool) -> None:
    """Shard each module's float32 parameters; it computes in `compute_dtype`, and gradients are reduced in float32.

    `offload` keeps the shards in host memory. Gradients then go there too, and AdamW, which makes its state beside the
    weights, steps there.
    """
    mixed = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    offloaded = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if offload else OffloadPolicy()
    for module in modules:
        fully_shard(module, mesh=mesh, mp_policy=mixed, offload_policy=offloaded)
