"""Which of unequal GPUs train, which sample, and how: AReaL-Hex (arXiv 2511.00796) with what this code can run. Pure.

The trainer has GPUs of one kind, the same number on each of its machines, as every rank gets an equal share of a step.
An engine has `tp` GPUs of one machine, the same number on all machines that have the same part. GPUs of a trainer's
machine that do not train sample there (weights by NCCL), those of other machines join the run, and pull the weights.
One GPU may do both in turns. Any GPU may stay idle.

Seconds of a step; g of generation, u of the weight update, t of training, α the async_ratio:

    step    about least_step_s(g + u, t, α, tail), at most most_step_s(g + u, t, L·d, α); tail is (L − R)·d with b = 1
    t       max(F/(ranks·C), micro-batches·exchanges of layers, micro-batches·HOST_LAYER_S·l for three passes)
            + exchanges of embedding and head, which no layer's computation hides, once an update or in each micro-batch
            + exchange among replicas + AdamW + publication
    F       2 FLOPs per weight, token and pass, a backward pass being two, and attention's half squares
    C, m    FLOP/s and bytes/s that a GPU reaches: those of its data sheet × mfu, less in short passes; × hbm_efficiency
    D       FLOP/s that a GPU reaches while it decodes
    g       tokens sampled for a step / Σ y·h: y engines with a rate h = b·R / (R·d + b·p) each, b requests at a time
    p       prefill of a prompt: 2·W·P/(tp·C) + (tp − 1)·(a + P·H·2/(tp·β))·4·l
    d       a token of each: c + max(2·W/(tp·m), 2·W·b/(tp·D)) + b·K·context/m + (tp − 1)·(a + b·H·2/(tp·β))·4·l
    u       max(2·W/β of the slowest link, × update_factor between machines, tensors × LOAD_S)

W weights, H hidden size, l layers, P and R mean tokens of prompt and response, L tokens of a step's longest response, K
bytes of KV cache per token and GPU, β bytes/s of a link one way, a its latency, c the host's part. p and d are HexGen's
(arXiv 2502.07903, table 1), but for W instead of 12·H²·l, c, the KV cache, whose reading HexGen leaves out, and the
maximum: the kernels of a layer read its weights while they multiply.

The paper alternates a search for t and one for g with a bisection of the GPUs. Here GPUs of a kind are alike, so that
only a few splits differ: all get a bound, and are solved, by MILP, as long as their bound is below what was found.
"""

import itertools
import math
import tomllib
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import NormalDist

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from asyncrl.cluster.cluster import check_shares
from asyncrl.cluster.gpus import Gpu
from asyncrl.cluster.placement import SHARE_ALONE, Placement
from asyncrl.config import Config
from extras.planning import memory
from extras.planning.advisor import least_step_s, most_step_s
from extras.planning.shape import ModelShape

LINK_LATENCY_S = 10e-6
"""Latency of a message within a machine (a)."""
HOST_BYTES_PER_S, ADAMW_BYTES = 16e9, 28
"""A rank's share of host memory, for copies and AdamW; what AdamW reads and writes of float32 per weight."""
SHORT_TOKENS, SHORT_MFU = 8192, 0.875
"""Tokens of a pass below which a GPU reaches less of its mfu, and how much of it: 0.35 of 0.4."""
HOST_LAYER_S = 6.5e-3
"""Seconds in which a rank's host launches a layer's passes over a micro-batch, forward and backward.

Beside an H200 a step of 28 layers took 0.73 s with four micro-batches of 8192 tokens and 0.38 s with one of 32,768, of
which kernels need 0.33 s: `trainer-long 0.6b`, `trainer-whole 0.6b` and `profile 0.6b` of results/gpu.
"""
DECODE_MFU = 0.6
"""Share of the data sheet's FLOP/s that matrix products reach while an engine decodes."""
LOAD_S = 0.31e-3
"""Seconds in which vLLM loads one weight of a model's files; the next ones are on their way meanwhile.

An engine on an H200 loaded the 310 of Qwen3-0.6B in 0.097 s by CUDA IPC: median, n = 5, `sync 0.6b` of results/gpu.
"""
TPS = (1, 2, 4, 8)
"""GPUs of an engine to choose from."""
SAVINGS = tuple(
    itertools.chain(
        *(itertools.combinations(("head", "activations", "optimizer"), n) for n in range(4))
    )
)
SHEETS, QUANTILES = Path(__file__).with_name("gpu_sheets.toml"), 2000
FINE, GAP = 32, 1e-4
"""Which part of the number of engines lies between two numbers that are tried beside the best; how far from the best a
MILP's answer may be, relative."""


@dataclass(frozen=True)
class Pool:
    """Equal machines: `count` with `gpus` each of a kind, whose data sheet says the rest, per GPU and one way."""

    name: str
    gpu: str
    count: int
    gpus: int
    price_per_hour: float
    tflops: float
    hbm_gb_per_s: float
    memory_gib: float
    gb_per_s: float
    called: str = ""
    """What the driver calls the GPU."""
    mfu: float = 0.4
    hbm_efficiency: float = 0.7
    host_s: float = 0.003
    """The host's part of a decode step (c)."""
    trained_tokens_per_s: float = 0.0
    """That a GPU was measured to train, prompts and AdamW not counted; 0 if it was not. It takes the place of mfu."""
    sampled_tokens_per_s: float = 0.0
    """That a GPU of an engine was measured to sample; 0 if it was not. It takes the place of hbm_efficiency."""

    @property
    def flops_per_s(self) -> float:
        """FLOP/s that a GPU reaches (C)."""
        return self.tflops * 1e12 * self.mfu

    @property
    def hbm_bytes_per_s(self) -> float:
        """Bytes/s that a GPU reads (m)."""
        return self.hbm_gb_per_s * 1e9 * self.hbm_efficiency

    @property
    def device(self) -> Gpu:
        """One of the GPUs, as the arithmetic of memory wants it."""
        return Gpu(self.gpu, round(self.memory_gib * memory.GIB), 0)


@dataclass(frozen=True)
class Cluster:
    """Machines, and GB/s one way between two of them. update_factor: AReaL-Hex's table 2 says 4 to 6."""

    pools: tuple[Pool, ...]
    same_kind: float
    across_kinds: float
    update_factor: float = 5.0


@dataclass(frozen=True)
class Lengths:
    """Mean tokens; `square` is that of prompt and response together, `longest` the longest response of a step."""

    prompt: float
    response: float
    square: float
    context: float
    """Of a request that runs at a random time: long ones are met more often."""
    longest: float

    @classmethod
    def of(cls, prompt: float, responses: Iterable[float], num: int) -> "Lengths":
        """What a prompt of this length and `num` responses in a step make, whose lengths are as likely as these."""
        r = np.sort(np.fromiter(responses, float))
        context = prompt + (r**2).mean() / (2 * r.mean())
        longest = r @ np.diff((np.arange(len(r) + 1) / len(r)) ** num)
        return cls(
            prompt,
            float(r.mean()),
            float(((prompt + r) ** 2).mean()),
            float(context),
            float(longest),
        )

    @classmethod
    def lognormal(cls, prompt: float, median: float, sigma: float, config: Config) -> "Lengths":
        """Return the lengths of responses that follow this law, cut at the longest allowed."""
        normals = np.array([NormalDist().inv_cdf((i + 0.5) / QUANTILES) for i in range(QUANTILES)])
        responses = np.clip(median * np.exp(sigma * normals), 1, config.max_response_tokens)
        return cls.of(prompt, responses, config.groups_per_step * config.group_size)


@dataclass(frozen=True)
class Job:
    """What is trained. Of the config, replicas, rollout_tp and save_memory are chosen, and the micro-batch lowered."""

    config: Config
    shape: ModelShape
    lengths: Lengths

    @property
    def responses(self) -> int:
        """Trained on in a step."""
        return self.config.groups_per_step * self.config.group_size

    @property
    def tokens(self) -> float:
        """Tokens that are sampled for a step."""
        return self.responses * self.lengths.response

    @property
    def read_tokens(self) -> float:
        """Tokens that the trainer reads in a pass over a step's batch."""
        prompts = self.config.groups_per_step * (
            self.config.group_size if self.config.share_prefix == "off" else 1
        )
        return prompts * self.lengths.prompt + self.tokens

    @property
    def extra_passes(self) -> int:
        """Passes without gradient: the reference, and proximal log-probs or values."""
        anchors = self.config.minibatches > 1 and self.config.proximal == "recompute"
        return (self.config.kl_coef > 0) + (anchors or self.config.advantage == "gae")

    @property
    def requests(self) -> int:
        """Requests that run at the same time at most. Of 1 + α batches one is the trainer's, if there are two."""
        return max(1, math.floor(self.responses * max(1.0, self.config.async_ratio)))


# Training


@dataclass(frozen=True)
class Training:
    """How the trainer runs: on `gpus` of each of `machines`, a replica of the model over `shards` of them."""

    pool: Pool
    machines: int
    gpus: int
    shards: int
    save_memory: tuple[str, ...]
    microbatch: int
    stages: bool
    """Whether weights are staged on its GPUs, for engines on its machines."""

    @property
    def ranks(self) -> int:
        """GPUs that train."""
        return self.machines * self.gpus

    def config(self, job: Job) -> Config:
        """The options with which it runs."""
        return replace(
            job.config,
            replicas=self.ranks // self.shards,
            save_memory=self.save_memory,
            max_tokens_per_microbatch=self.microbatch,
        )

    def items(self, job: Job) -> list[memory.Item]:
        """Memory of a rank while it makes a step."""
        config = self.config(job)
        resident = memory.alone_items(config, job.shape, self.shards, self.stages)
        return [*resident, *memory.step_items(config, job.shape, self.ranks, self.shards)]


def read_sheets() -> dict[str, dict]:
    """Numbers of every data sheet, and the driver's name, by that of the GPU."""
    sheets = tomllib.loads(SHEETS.read_text(encoding="utf-8"))
    return {
        gpu: {name: value for name, value in sheet.items() if name != "source"}
        for gpu, sheet in sheets.items()
    }


def compute_s(job: Job, t: Training) -> float:
    """Seconds that the GPUs that train compute for a step (F/(ranks·C))."""
    config, shape, lengths = job.config, job.shape, job.lengths
    squares = (
        shape.num_layers
        * shape.num_attention_heads
        * shape.head_dim
        * job.responses
        * lengths.square
    )
    in_layers = shape.num_layers * shape.layer_parameters - shape.idle_parameters
    used = in_layers * job.read_tokens + shape.vocab_size * shape.hidden_size * job.tokens
    passes = num_passes(job, t) - (config.lora_rank > 0)
    reached = t.pool.tflops * 1e12 * reached_mfu(job, t)
    return passes * 2 * (used + squares) / (t.ranks * reached)


def reached_mfu(job: Job, t: Training) -> float:
    """Share of the data sheet's FLOP/s that matrix products of the trainer reach, which is less in short passes."""
    tokens = min(t.microbatch, job.read_tokens / (t.ranks * job.config.minibatches))
    return t.pool.mfu * (SHORT_MFU if tokens < SHORT_TOKENS else 1)


def num_passes(job: Job, t: Training) -> int:
    """Passes over a micro-batch; a backward pass is two, and what was not kept for it is computed again."""
    return job.extra_passes + 1 + ("activations" in t.save_memory) + 2


def training_s(job: Job, cluster: Cluster, t: Training) -> float:
    """Seconds that the trainer needs for a step (t)."""
    config, pool = job.config, t.pool
    weights, trained = 2 * job.shape.num_parameters, memory.trained_parameters(config, job.shape)
    # Rings; those through the same shard of all replicas share a machine's link.
    across = min(pool.gb_per_s, cluster.same_kind)
    shard_link = pool.gb_per_s if t.shards <= t.gpus else across
    replica_link = (
        pool.gb_per_s if t.machines == 1 else min(across, cluster.same_kind / min(t.gpus, t.shards))
    )
    byte_s = (1 - 1 / t.shards) / (shard_link * 1e9)
    root, passes = 2 * job.shape.root_parameters, job.extra_passes
    root_gradients = 0 if config.lora_rank else 2 * root
    layers_s = byte_s * ((weights - root) * (passes + 2) + 4 * trained - root_gradients)
    replica_s = 2 * 4 * trained / t.shards * (1 - t.shards / t.ranks) / (replica_link * 1e9)
    count = config.minibatches * math.ceil(
        job.read_tokens / (t.ranks * config.minibatches * t.microbatch)
    )
    exchanges, root_passes = count, passes
    if "head" not in t.save_memory:  # the reference alone, a second model, gathers more
        exchanges, root_passes = config.minibatches, config.kl_coef > 0 and not config.lora_rank
    root_s = byte_s * (exchanges * (root + root_gradients) + count * root_passes * root)
    adamw_s = config.minibatches * ADAMW_BYTES * trained / t.shards / pool.hbm_bytes_per_s
    # for each pass shards come from the host, float32, and gradients go there
    if "optimizer" in t.save_memory:
        moved = 12 * count * job.shape.num_parameters + config.minibatches * ADAMW_BYTES * trained
        adamw_s = moved / t.shards / HOST_BYTES_PER_S
    replicas_s, publish_s = config.minibatches * replica_s, weights * byte_s
    host_s = count * job.shape.num_layers * HOST_LAYER_S * num_passes(job, t) / 3
    step_s = max(compute_s(job, t), count * layers_s, host_s)
    return step_s + root_s + replicas_s + adamw_s + publish_s


def trainings(job: Job, pool: Pool, machines: int, gpus: int, stages: bool) -> Iterator[Training]:
    """Settings that train on so many GPUs and fit; of each the largest micro-batch, which is the fastest."""
    ranks, room = machines * gpus, memory.available_bytes(pool.device)
    divisors = [shards for shards in range(1, ranks + 1) if not ranks % shards]
    for shards, savings in itertools.product(divisors, SAVINGS):
        if shards % gpus and gpus % shards:
            continue
        for tokens in memory.budgets(job.config):
            training = Training(pool, machines, gpus, shards, savings, tokens, stages)
            if memory.total(training.items(job)) <= room:
                yield training
                break


# Sampling


def load_s(job: Job) -> float:
    """Seconds in which an engine loads new weights, at least."""
    return job.shape.num_tensors * LOAD_S


@dataclass(frozen=True)
class Engine:
    """An engine of `tp` GPUs that has `requests` at a time (b)."""

    pool: Pool
    tp: int
    requests: float
    decode_s: float
    """A decode step (d)."""
    rate: float
    """Tokens/s of all requests (h)."""


def exchange_s(job: Job, pool: Pool, tp: int, tokens: float) -> float:
    """Seconds in which an engine's GPUs exchange what they computed of so many tokens."""
    bytes_s = tokens * job.shape.hidden_size * 2 / (tp * pool.gb_per_s * 1e9)
    return (tp - 1) * (LINK_LATENCY_S + bytes_s) * 4 * job.shape.num_layers


def prefill_s(job: Job, pool: Pool, tp: int) -> float:
    """Seconds of a prompt's prefill (p)."""
    flops = 2 * (job.shape.num_parameters - job.shape.idle_parameters) * job.lengths.prompt
    return flops / (tp * pool.flops_per_s) + exchange_s(job, pool, tp, job.lengths.prompt)


def decode_parts_s(
    job: Job, pool: Pool, tp: int, requests: float
) -> tuple[float, float, float, float]:
    """Seconds of a decode step: weights are read, they are multiplied with, the cache is read, and the rest."""
    weights = 2 * job.shape.parameters_of(requests)
    active = 2 * (job.shape.num_parameters - job.shape.idle_parameters)
    cache = requests * job.lengths.context * memory.kv_bytes_per_token(job.shape, tp)
    return (
        weights / tp / pool.hbm_bytes_per_s,
        active * requests / (tp * pool.tflops * 1e12 * DECODE_MFU),
        cache / pool.hbm_bytes_per_s,
        pool.host_s + exchange_s(job, pool, tp, requests),
    )


def decode_s(job: Job, pool: Pool, tp: int, requests: float) -> float:
    """Seconds of a decode step (d): weights are read while they are multiplied with."""
    weights_s, products_s, cache_s, rest_s = decode_parts_s(job, pool, tp, requests)
    return max(weights_s, products_s) + cache_s + rest_s


def make_engine(job: Job, pool: Pool, tp: int, requests: float) -> Engine:
    """An engine with its rate."""
    seconds, response = decode_s(job, pool, tp, requests), job.lengths.response
    rate = requests * response / (response * seconds + requests * prefill_s(job, pool, tp))
    return Engine(pool, tp, requests, seconds, rate)


def largest_engine(job: Job, pool: Pool, tp: int, room: float | None = None) -> Engine | None:
    """An engine with as many requests as max_running_requests and the KV cache allow; None if it does not fit.

    `room` is what a GPU has for the engine, bytes; by default it is the engine's own.
    """
    if room is None:
        share = job.config.gpu_memory_utilization or SHARE_ALONE
        room = min(share * pool.device.total_bytes, memory.available_bytes(pool.device))
    kv = room - memory.total(memory.engine_items(job.config, job.shape, tp))
    cache = kv / memory.kv_bytes_per_token(job.shape, tp)  # tokens
    if cache < job.config.max_sequence_tokens:
        return None
    most = min(job.config.max_running_requests, job.requests, int(cache // job.lengths.context))
    return make_engine(job, pool, tp, most)


def calibrated(job: Job, pool: Pool, requests: float | None = None) -> Pool:
    """The pool with the mfu and hbm_efficiency of its measured rates, if it has any; none is left.

    They are of the job, with its save_memory and rollout_tp, and of an engine with so many requests, as many as fit if
    not given. Raises ValueError for a rate that no efficiency gives.
    """
    mfu, efficiency, tp = pool.mfu, pool.hbm_efficiency, job.config.rollout_tp
    if pool.trained_tokens_per_s:
        budget = job.config.max_tokens_per_microbatch
        t = Training(pool, 1, 1, 1, job.config.save_memory, budget, False)
        mfu *= compute_s(job, t) * pool.trained_tokens_per_s / job.tokens
    pool = replace(pool, mfu=mfu, trained_tokens_per_s=0.0)
    if rate := tp * pool.sampled_tokens_per_s:
        largest = largest_engine(job, pool, tp)
        b = requests or (largest.requests if largest else 1)
        weights_s, products_s, cache_s, rest_s = decode_parts_s(job, pool, tp, b)
        left_s = b / rate - b * prefill_s(job, pool, tp) / job.lengths.response - rest_s
        rest_s += products_s
        if left_s <= products_s:
            raise ValueError(
                f"{pool.name} is said to sample {pool.sampled_tokens_per_s:g} tokens/s per GPU; with {b:.3g} requests "
                f"at a time all but memory takes {rest_s:.3g} s of the {b / rate:.3g} s of a step; lower host_s"
            )
        # The products hide the reading of weights, or else are hidden by it.
        efficiency *= max((weights_s + cache_s) / left_s, cache_s / (left_s - products_s))
    return replace(pool, hbm_efficiency=efficiency, sampled_tokens_per_s=0.0)


@dataclass(frozen=True)
class Site:
    """GPUs that may sample: `gpus` on each of `machines`. Where these train, all of them have the same engines."""

    pool: Pool
    machines: int
    gpus: int
    trains: bool


def choose_engines(
    options: Sequence[tuple[Site, Engine]],
    requests: int,
    least_rate: float | None = None,
    one_of: Collection[int] = (),
) -> list[tuple[Site, Engine, int]] | None:
    """Return how many engines each site has, of which number of GPUs; None if no choice keeps the limits.

    The choice has the highest rate, or at the lowest price `least_rate`. At least one of the options with an index in
    `one_of` is in it.
    """
    copies = np.array([site.machines if site.trains else 1 for site, _ in options])
    rates = copies * [engine.rate for _, engine in options]
    most = np.array(
        [site.gpus // e.tp * (1 if site.trains else site.machines) for site, e in options]
    )
    # Unknown are the number of each option, and whether it is chosen: of a site's options, only one may be.
    counts, is_chosen = np.split(np.eye(2 * len(options)), 2)
    limits = [(copies * [engine.requests for _, engine in options] @ counts, requests)]
    limits += [(row, 0) for row in counts - most[:, None] * is_chosen]
    for site in dict.fromkeys(site for site, _ in options):
        limits.append(([other is site for other, _ in options] @ is_chosen, 1))
    if one_of:
        limits.append((-counts[list(one_of)].sum(0), -1))
    cost = -rates
    if least_rate is not None:  # the last part prefers few GPUs among those that cost the same
        cost = copies * [engine.tp * (engine.pool.price_per_hour + 1e-3) for _, engine in options]
        limits.append((-rates @ counts, -least_rate))
    rows, upper = zip(*limits, strict=True)
    solution = milp(
        cost @ counts,
        constraints=LinearConstraint(np.array(rows), ub=upper),
        integrality=1,
        bounds=Bounds(0, np.append(most, np.ones(len(options)))),
        options={"mip_rel_gap": GAP},
    ).x
    if solution is None:
        return None
    numbers = (solution[: len(options)].round() * copies).astype(int).tolist()
    return [(*option, n) for option, n in zip(options, numbers, strict=True) if n] or None


# Both


@dataclass(frozen=True)
class Split:
    """Who trains and who may sample, and what no choice of engines exceeds."""

    job: Job
    training: Training
    training_s: float
    update_s: float
    options: tuple[tuple[Site, Engine], ...]
    """Engines that a site may have, each with as many requests as it has room for."""
    colocate: str | None = None
    """How trainer and engine share their GPU, if they do; they then take turns whatever α is."""

    @property
    def trainer(self) -> tuple:
        """The GPUs that train. Splits with the same trainer are alternatives of one plan."""
        t = self.training
        return t.pool, t.machines, t.gpus, self.colocate is None

    @property
    def alpha(self) -> float:
        """The async_ratio that the hardware lets count."""
        return 0.0 if self.colocate else self.job.config.async_ratio

    @cached_property
    def tails(self) -> list[float]:
        """Seconds of the tail with each of the options."""
        return [tail_s(self.job, [engine]) for _, engine in self.options]

    @cached_property
    def most_rate(self) -> float:
        """Tokens/s that no choice of engines exceeds.

        It is bounded by the best engine for each GPU, and by the best for each request, which is alone in its engine.
        """
        best: dict[Site, float] = {}
        for site, engine in self.options:
            best[site] = max(best.get(site, 0.0), engine.rate / engine.tp)
        by_gpus = sum(site.machines * site.gpus * rate for site, rate in best.items())
        alone = max(make_engine(self.job, e.pool, e.tp, 1).rate for _, e in self.options)
        return min(by_gpus, self.job.requests * alone)

    def step_s(self, rate: float, tail: float) -> float:
        """Seconds of a step, about, of engines with this rate, tokens/s, and this tail, seconds."""
        busy_s = self.job.tokens / rate + self.update_s
        return least_step_s(busy_s, self.training_s, self.alpha, tail)

    def least_rate(self, step_s: float, tail: float) -> float:
        """Tokens/s that the engines need for a step of so many seconds; infinite if no rate is enough."""
        busy_s = min(step_s, step_s * (1 + self.alpha) - self.training_s - tail)
        if busy_s <= self.update_s or self.training_s > step_s:
            return math.inf
        return self.job.tokens / (busy_s - self.update_s)

    def bound(self, limit_s: float | None, rate: float, tail: float) -> float:
        """Seconds of a step, or with a limit on them the price per hour, that it does not get below."""
        if limit_s is None:
            return self.step_s(rate, tail)
        least = self.least_rate(limit_s, tail)
        prices = (e.pool.price_per_hour * e.tp / e.rate for _, e in self.options)
        sampling = 0.0 if self.colocate else least * min(prices)
        trains = self.training.pool.price_per_hour * self.training.ranks
        return trains + sampling if least <= rate else math.inf


@dataclass(frozen=True)
class Plan:
    """A split with its engines, and what a step takes then."""

    split: Split
    engines: tuple[tuple[Site, Engine, int], ...]

    @property
    def rate(self) -> float:
        """Tokens/s of all engines."""
        return sum(engine.rate * count for _, engine, count in self.engines)

    @property
    def tail_s(self) -> float:
        """Seconds of the tail."""
        return tail_s(self.split.job, [engine for _, engine, _ in self.engines])

    @property
    def generation_s(self) -> float:
        """Seconds in which the engines sample what a step trains on (g)."""
        return self.split.job.tokens / self.rate

    @property
    def step_s(self) -> float:
        """Seconds of a step, about."""
        return self.split.step_s(self.rate, self.tail_s)

    @property
    def most_step_s(self) -> float:
        """Seconds of a step, at most: by its longest response, in the slowest engine."""
        split = self.split
        longest_s = split.job.lengths.longest * max(e.decode_s for _, e, _ in self.engines)
        busy_s = self.generation_s + split.update_s
        return most_step_s(busy_s, split.training_s, longest_s, split.alpha)

    @property
    def sampling_gpus(self) -> list[tuple[Pool, int]]:
        """GPUs that sample and train nothing."""
        engines = () if self.split.colocate else self.engines
        return [(engine.pool, engine.tp * count) for _, engine, count in engines]

    @property
    def cost_per_hour(self) -> float:
        """Price of the GPUs in use; those that stay idle cost nothing."""
        training = self.split.training
        used = [(training.pool, training.ranks), *self.sampling_gpus]
        return sum(pool.price_per_hour * gpus for pool, gpus in used)

    def value(self, limit_s: float | None) -> float:
        """What is to be least: seconds of a step, or with a limit on them the price per hour."""
        return self.cost_per_hour if limit_s else self.step_s


def tail_s(job: Job, engines: Iterable[Engine]) -> float:
    """Seconds for which a step's longest response decodes on, in the fastest engine, when a mean one has ended."""
    alone_s = min(decode_s(job, e.pool, e.tp, 1) for e in engines)
    return (job.lengths.longest - job.lengths.response) * alone_s


def solve(split: Split, limit_s: float | None = None) -> Plan | None:
    """Return the plan with the least step, or with a limit on it the cheapest; None if none keeps the limit.

    The step has two unknowns: the rate, and the tail, which the fastest engine decides. For each tail the best rate is
    sought, as long as the best rate of all so far could beat the best plan. A shorter tail allows fewer engines, so it
    has no higher rate.
    """
    plans: list[Plan] = []
    rate = split.most_rate
    for tail in sorted(set(split.tails), reverse=True):
        best = min((plan.value(limit_s) for plan in plans), default=math.inf)
        if split.bound(limit_s, rate, tail) * (1 + GAP) < best:
            plans += _plans_with_tail(split, tail, limit_s)
        if plans and limit_s is None:
            rate = max(plan.rate for plan in plans)
    return min(plans, key=lambda plan: plan.value(limit_s), default=None)


def _plans_with_tail(split: Split, tail: float, limit_s: float | None) -> list[Plan]:
    """Return plans, one of whose engines has at most this tail, for several numbers of engines.

    The controller gives a request to who has the fewest, so that all engines have as many, or as many as fit. How many
    that are depends on how many engines there are: powers of two are tried, then those beside the best.
    """
    requests, sites = split.job.requests, {site for site, _ in split.options}
    most = min(requests, sum(site.machines * site.gpus for site in sites))
    # fewer are all full
    least = min(most, max(1, requests // max(engine.requests for _, engine in split.options)))
    numbers = [least, *(1 << i for i in range(20) if least < 1 << i < most), most]
    plans: dict[int, Plan | None] = {}
    while numbers:
        plans |= {n: _plan_with_requests(split, requests / n, tail, limit_s) for n in numbers}
        fitting = [plan for plan in plans.values() if plan]
        if not fitting:
            return []
        best = min(fitting, key=lambda plan: plan.value(limit_s))
        num = sum(count for _, _, count in best.engines)
        by = max(1, num // FINE)
        beside = (num - by, num, num + by)
        numbers = [n for n in beside if least <= n <= most and n not in plans]
    return fitting


def _plan_with_requests(
    split: Split, requests: float, tail: float, limit_s: float | None
) -> Plan | None:
    """Return the plan with the best engines if each has so many requests, or as many as fit."""
    options = [
        (site, make_engine(split.job, e.pool, e.tp, min(requests, e.requests)))
        for site, e in split.options
    ]
    fast = [index for index, seconds in enumerate(split.tails) if seconds <= tail]
    least_rate = limit_s and split.least_rate(limit_s, tail)
    engines = choose_engines(options, split.job.requests, least_rate, fast)
    if engines is None:
        return None
    plan = sampled_by(split, engines)
    return plan if limit_s is None or plan.step_s <= limit_s * (1 + 1e-6) else None


def sampled_by(split: Split, counts: Iterable[tuple[Site, Engine, int]]) -> Plan:
    """Return the plan with so many of these engines, to which requests go in equal numbers, as far as they fit."""
    room = {(site, engine.tp): engine.requests for site, engine in split.options}
    engines = []
    requests_left, engines_left = split.job.requests, sum(count for _, _, count in counts)
    for site, engine, count in sorted(counts, key=lambda choice: room[choice[0], choice[1].tp]):
        requests = min(room[site, engine.tp], requests_left / engines_left)
        requests_left, engines_left = requests_left - count * requests, engines_left - count
        engines.append((site, make_engine(split.job, engine.pool, engine.tp, requests), count))
    return Plan(split, tuple(engines))


def splits(job: Job, cluster: Cluster) -> Iterator[Split]:
    """Every division of the GPUs, with the fastest training for it."""
    tps = [tp for tp in TPS if memory.can_split(job.shape, tp)]
    engines = {
        pool: [e for tp in tps if tp <= pool.gpus and (e := largest_engine(job, pool, tp))]
        for pool in cluster.pools
    }
    update = 2 * job.shape.num_parameters / 1e9
    for pool in cluster.pools:
        yield from _shared(job, cluster, pool)
        for machines, gpus in itertools.product(range(1, pool.count + 1), range(1, pool.gpus + 1)):
            if not _can_share(job.config, machines):
                continue
            left = [(other, other.count - machines * (other is pool)) for other in cluster.pools]
            sites = [Site(other, count, other.gpus, False) for other, count in left if count]
            near = [site for site in sites if site.pool.gpu == pool.gpu]
            far = [site for site in sites if site.pool.gpu != pool.gpu]
            reach = [([], math.inf), (near, cluster.same_kind), (far, cluster.across_kinds)]
            reach.append((sites, min(cluster.same_kind, cluster.across_kinds)))
            for stages in (False, True)[: 1 + (gpus < pool.gpus)]:
                beside = [Site(pool, machines, pool.gpus - gpus, True)] * stages
                timed = [
                    (training_s(job, cluster, training), training)
                    for training in trainings(job, pool, machines, gpus, stages)
                ]
                if not timed:
                    continue
                seconds, training = min(timed, key=lambda pair: pair[0])
                for joined, link in reach:
                    options = tuple(
                        (s, e)
                        for s in [*beside, *joined]
                        for e in engines[s.pool]
                        if e.tp <= s.gpus
                    )
                    publish_s = cluster.update_factor * update / link
                    update_s = max(stages * update / pool.gb_per_s, publish_s, load_s(job))
                    if options:
                        yield Split(job, training, seconds, update_s, options)


def _can_share(config: Config, machines: int) -> bool:
    """Whether the machines can share a step's groups evenly."""
    try:
        check_shares(replace(config, replicas=1), machines, machines)
    except ValueError:
        return False
    return True


def _shared(job: Job, cluster: Cluster, pool: Pool) -> Iterator[Split]:
    """Trainer and engine on one GPU, all others idle. Where they take turns the engine sleeps in a step."""
    update_s = max(4 * job.shape.num_parameters / pool.hbm_bytes_per_s, load_s(job))
    colocate = "sleep" if job.config.async_ratio == 0 else "share"
    for savings, tokens in itertools.product(SAVINGS, memory.budgets(job.config)):
        t = Training(pool, 1, 1, 1, savings, tokens, True)
        config = replace(t.config(job), colocate=colocate)
        try:
            share, _, _ = memory.plan_shared(config, job.shape, pool.device)
        except ValueError:
            continue
        if engine := largest_engine(job, pool, 1, share * pool.device.total_bytes):
            options = ((Site(pool, 1, 1, True), engine),)
            yield Split(job, t, training_s(job, cluster, t), update_s, options, colocate)


def plan(job: Job, cluster: Cluster, tokens_per_s: float | None = None, num: int = 4) -> list[Plan]:
    """Plans with the least step, or the cheapest with `tokens_per_s`, the best first: of each trainer's GPUs the best.

    Raises ValueError, with the arithmetic, if there is none.
    """
    cluster = replace(cluster, pools=tuple(calibrated(job, pool) for pool in cluster.pools))
    limit_s = tokens_per_s and job.tokens / tokens_per_s
    bounds = [
        (split.bound(limit_s, split.most_rate, min(split.tails)), split)
        for split in splits(job, cluster)
    ]
    if not bounds:
        raise ValueError(_refusal(job, cluster))
    best: dict[tuple, Plan] = {}
    for bound, split in sorted(bounds, key=lambda pair: pair[0]):
        values = sorted(plan.value(limit_s) for plan in best.values())
        if bound == math.inf or (len(values) >= num and bound >= values[num - 1]):
            break
        known = best.get(split.trainer)
        if known and bound >= known.value(limit_s):
            continue
        solved = solve(split, limit_s)
        if solved and (not known or solved.value(limit_s) < known.value(limit_s)):
            best[split.trainer] = solved
    if not best:
        fastest = job.tokens / plan(job, cluster, num=1)[0].step_s
        raise ValueError(f"no plan has {tokens_per_s:g} tokens/s; the fastest has {fastest:g}")
    plans = sorted(best.values(), key=lambda plan: plan.value(limit_s))[:num]
    if limit_s:
        return plans
    as_fast = [solve(p.split, p.step_s * (1 + GAP)) or p for p in plans]
    return sorted(as_fast, key=lambda plan: (plan.step_s, plan.cost_per_hour))


def of_placement(job: Job, cluster: Cluster, placement: Placement) -> Plan:
    """What a step takes if all machines, of one kind, have this placement of `placement.py`."""
    (pool,), config, weights = cluster.pools, job.config, 2 * job.shape.num_parameters
    ranks, worker = len(placement.trainer_gpus), placement.workers[0]
    training = Training(
        pool,
        pool.count,
        ranks,
        ranks * pool.count // config.replicas,
        config.save_memory,
        config.max_tokens_per_microbatch,
        placement.transport != "shm",
    )
    # By ipc the engine copies what it reads, by shm both ends do.
    copy_s = {
        "nccl": len(placement.workers) * weights / (pool.gb_per_s * 1e9),
        "ipc": 2 * weights / pool.hbm_bytes_per_s,
        "shm": 2 * weights / HOST_BYTES_PER_S,
    }[placement.transport]
    update_s = max(copy_s, load_s(job))
    room = None
    colocate = None
    if worker.shared_with_rank is not None:
        room = worker.gpu_memory_utilization * pool.device.total_bytes
        colocate = config.colocate
    engine = largest_engine(job, pool, config.rollout_tp, room)
    site = Site(pool, pool.count, pool.gpus - ranks, True)
    seconds = training_s(job, cluster, training)
    split = Split(job, training, seconds, update_s, ((site, engine),), colocate)
    return sampled_by(split, [(site, engine, len(placement.workers) * pool.count)])


def _refusal(job: Job, cluster: Cluster) -> str:
    """Why nothing fits: the least that a rank of each pool's largest trainer needs, and a GPU of its largest engine."""
    texts, tps = [], [tp for tp in TPS if memory.can_split(job.shape, tp)]
    for pool in cluster.pools:
        ranks, tp = pool.count * pool.gpus, max(tp for tp in tps if tp <= pool.gpus)
        t = Training(
            pool, pool.count, pool.gpus, ranks, SAVINGS[-1], memory.budgets(job.config)[-1], False
        )
        engine = memory.engine_items(job.config, job.shape, tp)
        texts.append(f"{pool.name} has {memory.available_bytes(pool.device) / memory.GIB:.1f} GiB")
        for who, items in {
            f"one of {ranks} trainer ranks": t.items(job),
            f"a GPU of a tp {tp} engine": engine,
        }.items():
            texts.append(
                f"{who} needs {memory.total(items) / memory.GIB:.1f} = {' + '.join(map(str, items))}"
            )
    return f"the model fits on no GPUs to train and to sample: {'; '.join(texts)}; take more GPUs, or larger ones"
