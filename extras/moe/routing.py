"""Mixtures of experts: what their routers choose, in the metrics, and a loss that balances the experts.

The loss is that within a sequence of DeepSeek-V3 (arXiv 2412.19437, equations 17 to 20). A router has a softmax p over
E experts and chooses k of them. The loss is the mean over sequences and layers of Σₑ fₑ·Pₑ. There fₑ is E/k times the
share of the sequence's tokens that have e among the k likeliest. Pₑ is the mean of p. The loss is 1 if all experts are
chosen alike, and larger otherwise. Packing cannot change it, because it is made of whole sequences. All tokens count,
also tokens of the prompt.

Differs from families that choose by a sigmoid, a bias or groups: the likeliest by the logits are counted.
"""

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from asyncrl.plugins import PolicyPlugin
from asyncrl.trainer.packing import MicroBatch
from asyncrl.trainer.policy import Policy

_GIVE_CHANCES = ("Gemma4TextRouter",)
"""Routers that return a softmax. The others return what one is made of."""


class Routing(PolicyPlugin):
    """Counts what the routers of a policy choose in the forward passes of updates, and balances it."""

    def __init__(self, policy: Policy, routers: list[nn.Module], index: int):
        """`index` is that of the output [tokens, E] in the tuple that a router may return."""
        model = policy.module.model
        self._policy = policy
        self._index = index
        self._weight = policy.config.optim.seq_aux_loss_coef
        self._gives_chances = type(routers[0]).__name__ in _GIVE_CHANCES
        self._top_k = torch.tensor([_top_k(router, model.config) for router in routers])
        self._outputs: list[Tensor] | None = None
        """Outputs of routers in the forward pass so far. None in the backward pass: it may compute layers again."""
        self._sums: list[tuple[Tensor, Tensor, Tensor]] = []
        self._routers = routers
        model.base_model.register_forward_pre_hook(self._begin)
        for router in routers:
            router.register_forward_hook(self._keep)
        for layer in model.modules():
            if isinstance(layer, GradientCheckpointingLayer):
                layer.register_forward_pre_hook(self._take)

    def _begin(self, model: nn.Module, inputs: tuple) -> None:
        self._take()
        self._outputs = []

    def _keep(self, router: nn.Module, inputs: tuple, output: tuple | Tensor) -> None:
        """Leave a router's output at the router until the next layer is computed.

        A compiled layer does so whenever it is computed: all layers then have one graph, also to be computed again.
        """
        is_wanted = torch.compiler.is_compiling() or self._outputs is not None
        if torch.is_grad_enabled() and is_wanted:
            output = output if isinstance(output, Tensor) else output[self._index]
            router.kept_output = output.flatten(0, -2).float()

    def _take(self, layer: nn.Module | None = None, inputs: tuple = ()) -> None:
        """Take the outputs that routers have left: they keep their layer's tensors. In the backward pass drop them."""
        for router in self._routers:
            kept = router.__dict__.pop("kept_output", None)
            if kept is not None and self._outputs is not None:
                self._outputs.append(kept)

    def extra_loss(self, batch: MicroBatch, num_sequences: float) -> Tensor:
        """Return this micro-batch's part of the loss that balances experts, times its weight."""
        self._take()
        outputs, self._outputs = torch.stack(self._outputs), None
        if not self._weight:
            outputs = outputs.detach()
        sequence_ids = (batch.position_ids.flatten() == 0).cumsum(0) - 1
        # only sequences with a trained token count, as an update is divided by their number; padding has no such token
        is_counted = torch.isin(sequence_ids, sequence_ids[batch.sources])
        sequence_ids = sequence_ids[is_counted]
        lengths = sequence_ids.bincount(minlength=1)
        chances = outputs[:, is_counted]
        if not self._gives_chances:
            chances = chances.softmax(dim=-1)
        top_k = self._top_k.to(chances.device)[:, None, None]
        likeliest = chances.topk(self._top_k.max()).indices
        is_chosen = torch.arange(likeliest.shape[-1], device=chances.device) < top_k
        choices = torch.zeros_like(chances)
        choices.scatter_(-1, likeliest, is_chosen.float().expand_as(likeliest))

        def means(values: Tensor) -> Tensor:
            """Means [layers, sequences, E] over the tokens of each sequence."""
            sums = values.new_zeros(len(values), len(lengths), values.shape[-1])
            return sums.index_add(1, sequence_ids, values) / lengths.clamp(min=1)[:, None]

        share = means(choices) * choices.shape[-1] / top_k
        balance = (share * means(chances)).sum(dim=(1, 2)).mean()
        entropy = torch.special.entr(chances).sum(dim=-1).mean(dim=0)
        totals = torch.stack([balance, entropy.sum()]).detach().double()
        counts = torch.stack([(lengths > 0).sum(), lengths.sum()])
        self._sums.append((choices.sum(dim=1).double(), totals, counts.double()))
        return self._weight * balance / num_sequences

    def metrics(self) -> dict[str, float]:
        """Return the metrics of all micro-batches since the last call, equal on all ranks; collective.

        `experts/load_max` is the load of the busiest expert over the mean one. `experts/unused` is the share of experts
        that no token chose. Both are means over layers. `experts/entropy` is a token's, nats. `experts/balance` is the
        loss.
        """
        load, totals, counts = (sum(column) for column in zip(*self._sums, strict=True))
        self._sums = []
        sums = self._policy.sum_over_ranks(torch.cat([load.flatten(), totals, counts]))
        load, (balance, entropy, sequences, tokens) = sums[:-4].view_as(load), sums[-4:].tolist()
        return {
            "experts/load_max": float((load / load.mean(dim=1, keepdim=True)).amax(dim=1).mean()),
            "experts/unused": float((load == 0).double().mean()),
            "experts/entropy": entropy / tokens,
            "experts/balance": balance / sequences,
        }


def find_routers(model: PreTrainedModel, weight: float) -> tuple[list[nn.Module], int]:
    """Return the routers of a model, and the index of their output [tokens, E] if they return a tuple.

    Raises ValueError for a `weight` above 0 of --optim.seq-aux-loss-coef and a model without routers.
    """
    recorder = (model.base_model._can_record_outputs or {}).get("router_logits")
    routers = []
    if recorder is not None:
        ending = recorder.layer_name or ""
        routers = [
            module
            for name, module in model.named_modules()
            if isinstance(module, recorder.target_class) and name.endswith(ending)
        ]
    if weight and not routers:
        raise ValueError(
            f"--optim.seq-aux-loss-coef {weight:g} balances experts, and a {model.config.model_type} has none that can "
            "be seen; leave it out"
        )
    return routers, recorder.index if routers else 0


def _top_k(router: nn.Module, config: PreTrainedConfig) -> int:
    """Return how many experts a router chooses for a token."""
    text = config.get_text_config()
    for owner, name in ((router, "top_k"), (text, "num_experts_per_tok"), (text, "top_k_experts")):
        if isinstance(getattr(owner, name, None), int):
            return getattr(owner, name)
    raise RuntimeError(f"a {config.model_type} does not say how many experts a token has")
