"""The trainer's side of router replay: gates that weigh, with live weights, the experts which the engine chose.

Rollout routing replay (R3), Ma et al., «Stabilizing MoE Reinforcement Learning by Aligning Training and Inference
Routers», arXiv 2510.11370. For logits z of a router, the recorded experts I and a router that
normalises over the chosen ones, expert i has the weight

    exp(z_i) / Σ_{j ∈ I} exp(z_j)        and without normalising        exp(z_i) / Σ_j exp(z_j)

So the gradient flows through the softmax into the router, and into no choice. A frozen reference replays too: its KL
then compares weights and not choices.

Tokens without experts of the engine are not replayed: padding, and the last token of a sequence, because it predicts no
token. This includes tokens that are scored without training, as by the probe.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from asyncrl.plugins import PolicyPlugin
from asyncrl.trainer.logprobs import TokenLogprobs, TokenScores
from asyncrl.trainer.packing import Bundle, MicroBatch, TrainSequence
from asyncrl.trainer.policy import Policy

NOT_RECORDED = -1
"""In place of an expert: the router chooses itself."""


@dataclass(frozen=True)
class RoutedMicroBatch(MicroBatch):
    """A micro-batch with the experts of its tokens."""

    experts: Tensor | None = None
    """[R·L, layers, k] int16; NOT_RECORDED for tokens without a record."""


class Replay:
    """The routers of a model. They take recorded experts if there are any."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        """Hook the routers of a causal LM of a family that option.py lists. It computes on `device`."""
        router_class = model.base_model._can_record_outputs["router_logits"].target_class
        self._routers = {
            int(re.search(r"layers\.(\d+)\.", name)[1]): module
            for name, module in model.named_modules()
            if isinstance(module, router_class)
        }
        for router in self._routers.values():
            router.recorded = None
            router.counts = torch.zeros(2, dtype=torch.int64, device=device)
            router.register_forward_hook(choose)

    def take(self, experts: Tensor | None) -> None:
        """Let the next passes take these experts, [R·L, layers, k] int16, or with None their routers' own."""
        for layer, router in self._routers.items():
            router.recorded = None if experts is None else experts[:, layer]

    def take_counts(self) -> Tensor:
        """Return how many recorded experts a router would not have chosen, and how many were replayed: [2] int64.

        Counted are the passes with gradient since the last call.
        """
        counts = sum(router.counts for router in self._routers.values()).clone()
        for router in self._routers.values():
            router.counts.zero_()
        return counts


def choose(router: nn.Module, inputs: tuple, output: tuple) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return logits [tokens, E], weights [tokens, k] and experts [tokens, k] with the recorded experts, if any.

    `output` is what a router of transformers returns: the same with its own choice.
    """
    if router.recorded is None:
        return None
    logits, own_weights, own_experts = output
    is_recorded = router.recorded != NOT_RECORDED
    experts = torch.where(is_recorded, router.recorded.to(own_experts.dtype), own_experts)
    if getattr(router, "norm_topk_prob", True):
        weights = logits.gather(1, experts).softmax(dim=-1, dtype=torch.float32)
    else:
        weights = logits.softmax(dim=-1, dtype=torch.float32).gather(1, experts)
    if torch.is_grad_enabled():
        is_new = (experts[:, :, None] != own_experts[:, None, :]).all(dim=-1)
        router.counts += torch.stack([is_new.sum(), is_recorded.sum()])
    return logits, weights.to(own_weights.dtype), experts


class Replaying(PolicyPlugin):
    """Replays the recorded experts in a policy's passes over the sequences of a step."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        modules = {policy.module, policy.reference or policy.module}
        self._replays = {module: Replay(module.model, policy.device) for module in modules}
        self._num_bytes: dict[int, int] = {}
        """Size of each record that was packed since the last step, by its id; --certificate packs some twice."""

    def extend_batch(self, batch: MicroBatch, bundles: list[Bundle]) -> MicroBatch:
        """Return the micro-batch with the experts of its tokens."""
        sequences = [bundle.sequences[0] for bundle in bundles]
        config = self._policy.module.model.config
        experts = place_experts(
            sequences, batch, config.num_hidden_layers, config.num_experts_per_tok
        )
        self._num_bytes |= {
            id(sequence.experts): sequence.experts.nbytes
            for sequence in sequences
            if sequence.num_trained
        }
        return RoutedMicroBatch(**vars(batch), experts=experts)

    def forward(
        self,
        score: Callable[..., TokenScores],
        module: TokenLogprobs,
        batch: MicroBatch,
        attention_kwargs: dict | None,
    ) -> TokenScores:
        """Score the trained tokens of a micro-batch with its recorded experts."""
        is_routed = isinstance(batch, RoutedMicroBatch)
        self._replays[module].take(batch.experts if is_routed else None)
        return score(module, batch, attention_kwargs)

    def metrics(self) -> dict[str, float]:
        """Return how a step's record differs from the trainer's own choice, and how large it is.

        `experts/rerouted` is the share of the recorded experts that the trainer's own routers would not have chosen.
        `experts/recorded_mib` is the size of the record, MiB.
        """
        counts = self._replays[self._policy.module].take_counts()
        counts = torch.cat([counts, counts.new_tensor([sum(self._num_bytes.values())])])
        self._num_bytes.clear()
        num_new, num_replayed, num_bytes = self._policy.sum_over_ranks(counts).tolist()
        return {
            "experts/rerouted": num_new / num_replayed,
            "experts/recorded_mib": num_bytes / 2**20,
        }


def place_experts(
    sequences: list[TrainSequence], batch: MicroBatch, num_layers: int, top_k: int
) -> Tensor:
    """Return the experts of a micro-batch, [R·L, layers, k] int16, each sequence where `pack` has put its tokens.

    Sequences without a trained token have no effect, and are left out.
    Raises ValueError for a sequence without a record, and RuntimeError for a record that does not fit it.
    """
    experts = np.full((batch.input_ids.numel(), num_layers, top_k), NOT_RECORDED, np.int16)
    sources = batch.sources.tolist()
    num_before = 0
    for sequence in sequences:
        if not sequence.num_trained:
            continue
        if sequence.experts is None:
            raise ValueError(
                "--router-replay got a response without experts: its batch was sampled without the option; leave it out"
            )
        shape = (len(sequence.tokens) - 1, num_layers, top_k)
        if sequence.experts.shape != shape:
            raise RuntimeError(
                f"the engine returned experts {sequence.experts.shape} for {len(sequence.tokens)} tokens, not {shape}"
            )
        # the place that predicts the first trained token is just before it
        start = sources[num_before] + 1 - int(sequence.loss_mask.argmax())
        experts[start : start + len(sequence.experts)] = sequence.experts
        num_before += sequence.num_trained
    return torch.from_numpy(experts)
