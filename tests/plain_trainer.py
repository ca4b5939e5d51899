"""An oracle of the trainer: a plain transformers model that reads each sequence alone, and steps by definition.

Nothing here packs, shares, shards or chunks. Everything behind the logits is computed in float64.
"""

import copy
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tiny_policy import VERSION, assert_same_gradient, brute_force_nucleus
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.func import functional_call
from transformers import AutoModelForCausalLM

from algos import KL_ESTIMATORS, LossInputs
from algos.centering import centering_term
from algos.inputs import couples_tokens
from asyncrl.trainer.loss_choice import choose_loss
from asyncrl.trainer.optimizer import learning_rate
from asyncrl.trainer.sharding import gather
from asyncrl.trainer.splitting import distribute

LAGS_OF_BUCKET = {
    "": (0, math.inf),
    "/lag_0": (0, 0),
    "/lag_1": (1, 1),
    "/lag_2": (2, 2),
    "/lag_3-4": (3, 4),
    "/lag_5-8": (5, 8),
    "/lag_9-16": (9, 16),
    "/lag_17+": (17, math.inf),
}
REFERENCE_SCALE = 0.8
"""Factor of the reference's head, which makes the reference less sure than the trained model."""
NUM_CHOSEN = 2
"""Experts that a token of a tiny mixture has, where its layers do not differ in that."""
MASKED = -1e4
"""Logit of a token that sampling leaves out: its probability is 0 in float64, and its product with a log-prob too."""


@torch.no_grad()
def randomize(policy):
    """Give adapters and value head random weights, and the reference another head; collective."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in policy.module.named_parameters():
        if is_added(name):
            weight = torch.randn(parameter.shape, generator=generator) / 20
            if isinstance(parameter, DTensor):
                weight = distribute_tensor(weight, parameter.device_mesh, parameter.placements)
            parameter.copy_(weight)
    if policy.reference not in (None, policy.module):
        policy.reference.model.get_output_embeddings().weight.mul_(REFERENCE_SCALE)


def is_added(name):
    """Whether a parameter of this name is trained, but is none of the model's own."""
    return name.endswith(("lora_A", "lora_B", "value_head.weight"))


def record_gradients(policy) -> list[dict[str, Tensor]]:
    """Return a list that gets the full gradient of each later update, by parameter name, as the optimizer sees it."""
    gradients = []

    def record(*_):
        gradients.append(
            {
                name.removeprefix("model."): gather(parameter.grad).clone()
                for name, parameter in policy.module.named_parameters()
                if parameter.grad is not None
            }
        )

    policy.optimizer.register_step_pre_hook(record)
    return gradients


class PlainTrainer:
    """A model as transformers reads it, with the adapters and the value head of a policy. Its optimizer is SGD."""

    def __init__(self, policy):
        """Take the options of a policy of one rank, and its adapters and value head as they are now."""
        self.config = policy.config
        self.model = AutoModelForCausalLM.from_pretrained(policy.model_path).eval()
        self.reference = copy.deepcopy(self.model)
        self.trained = {
            name.removeprefix("model."): gather(parameter).detach().clone().requires_grad_()
            for name, parameter in policy.module.named_parameters()
            if is_added(name)
        }
        self.head = {name: self.trained.pop(name) for name in list(self.trained) if "head" in name}
        if not self.config.lora_rank:
            self.trained |= dict(self.model.named_parameters())
            self.reference.get_output_embeddings().weight.data.mul_(REFERENCE_SCALE)
        self.loss = choose_loss(self.config)
        self.num_updates = 0
        self.routed = []
        """Of each sequence that was read for an update: the chances [layers, T, E] of experts."""

    def weights(self) -> dict[str, Tensor]:
        """Return the weights that adapters change, by name: W + 2·B·A."""
        weights = {}
        for name, weight in self.model.named_parameters():
            owner = name.removesuffix(".weight")
            if f"{owner}.lora_A" in self.trained:
                product = self.trained[f"{owner}.lora_B"] @ self.trained[f"{owner}.lora_A"]
                weights[name] = weight + 2 * product
        return weights

    def read(self, sequences, model=None, raw=False):
        """Return log-probs, entropies and values of the trained tokens, [N] float64 each.

        `model` is read as it is; without one, the trained model is read. `raw` leaves the sampling transform out.
        """
        weights = self.weights() if model is None else {}
        columns = []
        for sequence in sequences:
            self.sequence = sequence
            tokens = torch.from_numpy(sequence.tokens)[None]
            options = {"output_hidden_states": True, "output_router_logits": True}
            output = functional_call(model or self.model, weights, tokens, options)
            if torch.is_grad_enabled() and "router_logits" in output:
                self.routed.append(self.chances(output.router_logits))
            before = np.flatnonzero(sequence.loss_mask) - 1
            targets = tokens[0, before + 1]
            logits = self.transformed(output.logits[0, before], targets, raw)
            logprobs = logits.log_softmax(dim=-1)
            entropies = -(logprobs.exp() * logprobs).sum(dim=-1)
            hidden = output.hidden_states[-1][0, before]
            values = hidden.new_zeros(len(hidden))
            for head in self.head.values():
                values = hidden @ head
            picked = logprobs.gather(1, targets[:, None]).squeeze(1)
            columns.append((picked, entropies, values.double()))
            if self.config.centering:
                ids = torch.from_numpy(sequence.top_ids[before + 1]).long()
                columns[-1] += (logprobs.gather(1, ids),)
        scores = [torch.cat(column) for column in zip(*columns, strict=True)]
        self.top_scores = scores[3:]
        return scores[:3]

    def chances(self, layers):
        """Return the chances of experts, [layers, T, E] float64, of what transformers records."""
        logits = torch.stack([layer.double() for layer in layers])
        return logits if self.model.config.model_type == "gemma4_text" else logits.softmax(dim=-1)

    def transformed(self, logits, targets, raw):
        """Return the logits [N, V] float64 that tokens are sampled by."""
        config = self.config
        cuts = (config.top_p, config.top_k, config.min_p)
        if raw:
            return logits.double()
        if cuts == (1.0, 0, 0.0):
            return logits.double() / config.temperature
        kept = [
            brute_force_nucleus(row, target, config.temperature, *cuts).isfinite()
            for row, target in zip(logits.detach(), targets.tolist(), strict=True)
        ]
        return (logits.double() / config.temperature).masked_fill(~torch.stack(kept), MASKED)

    def train_step(self, updates):
        """Make a step. Return its metrics but for those of tokens read, and the gradient of each update by name."""
        num_tokens = sum(len(s.tokens) for update in updates for s in update)
        num_distinct = sum(len(distinct_prefixes(update)) for update in updates)
        metrics = {"tokens/shareable": 1 - num_distinct / num_tokens}
        updates = [[s for s in update if s.num_trained] for update in updates]
        columns = [columns_of(update) for update in updates]
        order = self.order(len(updates))
        lags = np.concatenate([tokens["lag"] for tokens in columns])
        stale = [VERSION - s.oldest_version for update in updates for s in update]
        metrics |= {
            "samples": len(stale),
            "staleness/mean": np.mean(stale),
            "staleness/max": max(stale),
            "staleness/token_mean": lags.mean(),
        }
        self.choices = []
        with torch.no_grad():
            for update, tokens in zip(updates, columns, strict=True):
                tokens["proximal"], _, tokens["value"] = self.read(update)
                if len(order) == 1 or self.config.proximal == "loglinear":
                    del tokens["proximal"]
        if self.config.advantage == "gae":
            metrics |= self.estimate(columns)
        results = []
        for num_made, index in enumerate(order):
            progress = num_made / len(order)
            results.append(self.update(updates[index], columns[index], progress))
        of_updates, statistics, gradients = zip(*results, strict=True)
        for name in of_updates[0]:
            metrics[name] = float(np.mean([update[name] for update in of_updates]))
        metrics["loss/lr"] = of_updates[-1]["loss/lr"]
        if self.choices:
            metrics |= self.of_experts()
        return metrics | reduce(statistics), list(gradients)

    def order(self, num_minibatches):
        """Return the minibatch of each update: those of later epochs come in an order of seed, version and epoch."""
        order = list(range(num_minibatches))
        for epoch in range(1, self.config.optim.epochs):
            generator = np.random.default_rng((self.config.seed, VERSION, epoch))
            order.extend(generator.permutation(num_minibatches))
        return order

    def estimate(self, columns):
        """Give each token of a step its advantage and return, one sequence after the other from its end."""
        options = self.config.advantage_options
        for tokens in columns:
            rewards, values, ids = (tokens[name].tolist() for name in ("advantage", "value", "id"))
            estimates = []
            for lam in (options.lam, options.value_lam):
                estimate = []
                for place in reversed(range(len(ids))):
                    if ids[place : place + 1] != ids[place + 1 : place + 2]:
                        error = rewards[place] - values[place]
                    else:
                        error = options.gamma * values[place + 1] - values[place]
                        error += options.gamma * lam * estimate[-1]
                    estimate.append(error)
                estimates.append(torch.tensor(estimate[::-1], dtype=torch.float64))
            tokens["advantage"], errors = estimates
            tokens["return"] = tokens["value"] + errors
        advantages = torch.cat([tokens["advantage"] for tokens in columns])
        if options.whiten:
            for tokens in columns:
                tokens["advantage"] = (tokens["advantage"] - advantages.mean()) / advantages.std()
        returns = torch.cat([tokens["return"] for tokens in columns])
        errors = returns - torch.cat([tokens["value"] for tokens in columns])
        return {"value/explained_variance": float(1 - errors.var() / returns.var())}

    def update(self, sequences, tokens, progress):
        """Make an update. Return its own metrics, its statistics [N] by name, and its gradient by parameter name."""
        config = self.config
        self.routed = []
        logprobs, entropies, values = self.read(sequences)
        losses, stats = self.losses(sequences, tokens, logprobs, progress)
        if config.optim.entropy_coef:
            losses = losses - config.optim.entropy_coef * entropies
        if "return" in tokens:
            stats["value/loss"] = (values - tokens["return"]) ** 2 / 2
            losses = losses + config.advantage_options.value_coef * stats["value/loss"]
        divisors = {
            "token_mean": len(losses),
            "sequence_mean": len(sequences) * tokens["length"],
            "constant": len(sequences) * config.max_response_tokens,
        }
        loss = (losses / divisors[config.loss_aggregation]).sum()
        (slopes,) = torch.autograd.grad(loss, logprobs, retain_graph=True)
        if self.routed:
            balances = [self.balance(chances) for chances in self.routed]
            loss = loss + config.optim.seq_aux_loss_coef * sum(balances) / len(balances)
        loss.backward()
        log_ratios = logprobs.detach() - tokens["behavior"]
        rows = {
            "drift/k1": -log_ratios,
            "drift/k3": log_ratios.exp() - 1 - log_ratios,
            "ratio": log_ratios.exp(),
            "entropy": entropies,
            **{name: tokens[name] for name in ("advantage", "reward", "length", "lag", "id")},
            **stats,
            "slope": slopes,
        }
        rows = {name: row.detach().double().numpy() for name, row in rows.items()}
        share = sample_size(sequence_ratios(rows)) if config.optim.scale_lr_by_ess else 1.0
        lr = learning_rate(config, self.num_updates, VERSION + progress, share)
        return {"loss/total": loss.item(), "loss/lr": lr, **self.step(lr)}, rows, self.gradient

    def balance(self, chances):
        """Return the balance loss of a sequence, by the chances [layers, T, E] of experts; note what it chooses."""
        num_chosen = getattr(self.model.config, "moe_topk", [NUM_CHOSEN] * len(chances))
        num_chosen = torch.tensor(num_chosen)[:, None]
        places = chances.argsort(dim=-1, descending=True).argsort(dim=-1)
        is_chosen = (places < num_chosen[..., None]).double()
        shares = is_chosen.mean(dim=1) / num_chosen * chances.shape[-1]
        balance = (shares * chances.mean(dim=1)).sum(dim=-1).mean()
        entropies = -(chances * chances.log()).sum(dim=-1).mean(dim=0)
        self.choices.append((is_chosen.sum(dim=1), entropies.detach(), balance.item()))
        return balance

    def of_experts(self) -> dict[str, float]:
        """Return the metrics of the experts that the tokens of a step chose."""
        loads, entropies, balances = zip(*self.choices, strict=True)
        load = sum(loads)
        return {
            "experts/balance": np.mean(balances),
            "experts/entropy": torch.cat(entropies).mean().item(),
            "experts/load_max": (load.amax(dim=1) / load.mean(dim=1)).mean().item(),
            "experts/unused": (load == 0).double().mean().item(),
        }

    def losses(self, sequences, tokens, logprobs, progress):
        """Return the loss of each token, with the penalty to the reference, and the stats of the loss."""
        held = logprobs.detach()
        proximal = tokens.get("proximal", held)
        if "proximal" not in tokens and progress:
            share = tokens["lag"] / (tokens["lag"] + progress)
            proximal = tokens["behavior"] + share * (held - tokens["behavior"])
        others = [tokens[name] for name in ("behavior", "advantage", "reward", "id")]
        lags = tokens["lag"].long()
        inputs = LossInputs(logprobs, others[0], proximal, *others[1:], lags)
        arguments = (inputs, inputs.to("cpu")) if couples_tokens(self.loss) else (inputs,)
        losses, stats = self.loss(*arguments)
        if self.config.centering:
            # tests/algos/test_centering.py compares the term itself with a loop
            top = torch.from_numpy(np.concatenate([s.top_logprobs[s.loss_mask] for s in sequences]))
            term, of_term = centering_term(self.loss, inputs, *self.top_scores, top.double())
            losses, stats = losses + term, stats | of_term
        if self.config.kl_coef:
            with torch.no_grad():
                reference = self.read(sequences, self.reference)[0]
            penalty = KL_ESTIMATORS[self.config.kl_estimator](logprobs, reference, others[0])
            stats = {**stats, "kl_ref": penalty}
            losses = losses + self.config.kl_coef * penalty
        return losses, stats

    def step(self, lr):
        """Clip the gradient, keep a copy of it, and follow it. Return the metrics of that."""
        self.gradient = {}
        norms = []
        num_changed = []
        for group, scale in (
            (self.trained, 1.0),
            (self.head, self.config.advantage_options.value_lr),
        ):
            norms.append(torch.nn.utils.clip_grad_norm_(group.values(), self.config.max_grad_norm))
            for name, weight in group.items():
                before = weight.detach().bfloat16()
                weight.data -= lr * scale * weight.grad
                num_changed.append(int((weight.bfloat16() != before).sum()))
                self.gradient[name] = weight.grad
                weight.grad = None
        num_weights = sum(weight.numel() for weight in self.trained.values())
        share = sum(num_changed[: len(self.trained)]) / num_weights
        self.num_updates += 1
        return {"loss/grad_norm": float(norms[0]), "loss/changed_weights": share}


def columns_of(sequences) -> dict[str, Tensor]:
    """Return what is known of the N trained tokens, [N] each by name; numbers are float64."""

    def column(name):
        rows = [np.broadcast_to(getattr(s, name), s.tokens.shape)[s.loss_mask] for s in sequences]
        return torch.from_numpy(np.concatenate([np.zeros(0), *rows]))

    ids = [number for number, s in enumerate(sequences) for _ in range(s.num_trained)]
    return {
        "token": column("tokens"),
        "behavior": column("behavior_logprobs"),
        "advantage": column("advantage"),
        "reward": column("reward"),
        "length": column("num_trained"),
        "lag": VERSION - column("policy_versions"),
        "id": torch.tensor(ids, dtype=torch.int64),
    }


def distinct_prefixes(sequences) -> set[tuple[int, ...]]:
    """Return the nodes of the tree of sequences: each is the tokens from the root to there."""
    return {tuple(s.tokens[: t + 1].tolist()) for s in sequences for t in range(len(s.tokens))}


def reduce(statistics) -> dict[str, float]:
    """Return the metrics that statistics of each update, [N] by name, are reduced to."""
    rows = {name: np.concatenate([update[name] for update in statistics]) for name in statistics[0]}
    metrics = {}
    for bucket, (first, last) in LAGS_OF_BUCKET.items():
        is_inside = (first <= rows["lag"]) & (rows["lag"] <= last)
        if is_inside.any():
            of_bucket = means({name: row[is_inside] for name, row in rows.items()})
            metrics[f"tokens/trained{bucket.replace('/', '_')}"] = int(is_inside.sum())
            metrics |= {name + bucket: value for name, value in of_bucket.items()}
    ratios = np.sort(np.exp(-rows["drift/k1"]))
    for name, share in {"ratio_q01": 0.01, "ratio_q99": 0.99, "ratio_max": 1.0}.items():
        metrics[f"loss/{name}"] = ratios[round(share * (len(ratios) - 1))]
    whole = np.concatenate([sequence_ratios(update) for update in statistics])
    return metrics | {"loss/sequence_ess": sample_size(whole)}


def means(rows) -> dict[str, float]:
    """Return the means of statistics [N] by name, and what else is said of N tokens."""
    weights = rows.get("weight", rows["ratio"])
    metrics = {name: row.mean() for name, row in rows.items() if name not in ("lag", "id")}
    metrics["slope"] = np.linalg.norm(rows["slope"])
    if weights.any():
        metrics["ess"] = sample_size(weights)
    return {name if "/" in name else f"loss/{name}": value for name, value in metrics.items()}


def sequence_ratios(rows):
    """Return the importance ratio of each sequence as a whole."""
    return np.exp(np.bincount(rows["id"].astype(int), weights=-rows["drift/k1"]))


def sample_size(weights) -> float:
    """Return the effective size, as a share, of a sample with these weights."""
    return weights.sum() ** 2 / (len(weights) * (weights**2).sum())


def make_step(policy, updates, budget):
    """Have a policy make a step of sequences that all ranks have. Return its metrics and gradients as PlainTrainer's.

    Each update has an empty micro-batch besides, as a rank has where others have more.
    """
    gradients = record_gradients(policy)
    policy.config = replace(policy.config, max_tokens_per_microbatch=budget)
    num_ranks, layout = dist.get_world_size(), policy.module.layout
    shares = distribute(updates, num_ranks, budget, layout, policy.split_over_ranks)
    share = [[*update, []] for update in shares[dist.get_rank()]]
    return policy.train_step(share, VERSION), gradients


def check_step(policy, updates, budget, expected=None, relative=1e-5) -> float:
    """Compare all metrics of a step, and the gradient of each update, with PlainTrainer's. Return the share saved."""
    expected_metrics, expected_gradients = expected or PlainTrainer(policy).train_step(updates)
    metrics, gradients = make_step(policy, updates, budget)
    saved_share = metrics.pop("tokens/saved_share")
    num_tokens = sum(len(s.tokens) for update in updates for s in update)
    assert saved_share == pytest.approx(1 - metrics.pop("tokens/forward") / num_tokens)
    assert metrics == pytest.approx(expected_metrics, rel=3e-4, abs=1e-5)
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        assert_same_gradient(gradient, expected_gradient, relative)
    return saved_share


def relative_error(gradient, expected) -> float:
    """Return the norm of what a gradient, by parameter name, differs by from another, over the norm of that one."""
    errors = [(gradient[name] - exact).norm() for name, exact in expected.items()]
    norms = [exact.norm() for exact in expected.values()]
    return float(torch.stack(errors).norm() / torch.stack(norms).norm())
