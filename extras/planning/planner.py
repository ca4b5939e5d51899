"""Choose which of unequal GPUs train, which sample, and how: AReaL-Hex (arXiv 2511.00796) for what this code can run.

Pure. The trainer has GPUs of one kind, equally many on each machine, because ranks have equal shares of a step. An
engine has `tp` GPUs of one machine. All engines of a site have the same tp. GPUs of a trainer's machine that do not
train sample there, and get weights by NCCL. Other machines join the run and pull weights. Trainer and engine can take
turns on one GPU. Any GPU can stay idle. extras/planning/README.md says what AReaL-Hex has beyond that.

Seconds of a step, with α the async_ratio:

    step    about least_step_s(g + u, t, α, tail), at most most_step_s(g + u, t, L·d, α); tail is (L − R)·d with b = 1
    t       training: max(F/(ranks·C), micro-batches·exchanges of layers, micro-batches·HOST_LAYER_S·l for three passes)
            + exchanges of embedding and head, once an update or in each micro-batch
            + exchange among replicas + AdamW + publication
    F       2 FLOPs per weight, token and pass, a backward pass being two, and attention's half squares
    C, m    FLOP/s and bytes/s that a GPU reaches: its data sheet × mfu, less in short passes; × hbm_efficiency
    D       FLOP/s that a GPU reaches while it decodes
    g       generation: tokens of a step / Σ y·h, of y engines with a rate h = b·R / (R·d + b·p), b requests at a time
    p       prefill of a prompt: 2·W·P/(tp·C) + (tp − 1)·(a + P·H·2/(tp·β))·4·l
    d       a decode step: c + max(2·W/(tp·m), 2·W·b/(tp·D)) + b·K·context/m + (tp − 1)·(a + b·H·2/(tp·β))·4·l
    u       update: max(2·W/β of the slowest link, × update_factor between machines, tensors × LOAD_S)

W weights, H hidden size, l layers, P and R mean tokens of prompt and response, L tokens of a step's longest response, K
bytes of KV cache per token and GPU, β bytes/s of a link one way, a its latency, c the host's part. p and d are those of
HexGen (arXiv 2502.07903, table 1) with three changes. W replaces 12·H²·l, and the KV cache is read. The maximum is
taken because the kernels of a layer read its weights while they multiply.

GPUs of a kind are alike, so only a few splits differ. All are solved.
"""

import itertools
import math
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import NormalDist

import numpy as np

from asyncrl.cluster.cluster import check_shares
from asyncrl.cluster.gpus import Gpu
from asyncrl.cluster.placement import SHARE_ALONE, Placement
from asyncrl.config import AtLeastOne, Config, NonNegative, Positive
from extras.planning import memory
from extras.planning.advisor import least_step_s, most_step_s
from extras.planning.shape import ModelShape

LINK_LATENCY_S = 10e-6
"""Latency of a message within a machine (a)."""
HOST_BYTES_PER_S, ADAMW_BYTES = 16e9, 28
"""Speed of host memory for a rank, and float32 bytes that AdamW reads and writes per weight."""
SHORT_TOKENS, SHORT_MFU = 8192, 0.875
"""Passes of fewer tokens reach only this share of mfu: 0.35 of 0.4."""
HOST_LAYER_S = 6.5e-3
"""Seconds that a rank's host needs to launch a layer's passes over a micro-batch, forward and backward.

Beside an H200 a step of 28 layers took 0.73 s with four micro-batches of 8192 tokens. It took 0.38 s with one of
32,768, and kernels need 0.33 s of that. Source: `trainer-long 0.6b`, `trainer-whole 0.6b` and `profile 0.6b` of
results/gpu.
"""
DECODE_MFU = 0.6
"""Share of the data sheet's FLOP/s that matrix products reach while an engine decodes."""
LOAD_S = 0.31e-3
"""Seconds that vLLM needs to load one weight of a model's files. The next weights are copied meanwhile.

An engine on an H200 loaded the 310 of Qwen3-0.6B in 0.097 s by CUDA IPC. It is the median, n = 5, of `sync 0.6b`
of results/gpu.
"""
TPS = (1, 2, 4, 8)
"""Numbers of GPUs that an engine can have."""
SHEETS, QUANTILES = Path(__file__).with_name("gpu_sheets.toml"), 20_000
MOST_COMBINATIONS, BESIDE = 4096, 2
"""Combinations of the sites' engines that are tried at a time; and choices on each side of the best."""
NUM_PLANS = 4
"""Plans that people are shown."""
GAP = 1e-4
"""Relative difference below which two steps count as equally long."""


@dataclass(frozen=True)
class Pool:
    """Equal machines: `count` with `gpus` of a kind each. Rates are of a GPU, by its data sheet, and links one way."""

    name: str
    gpu: str
    count: AtLeastOne
    gpus: AtLeastOne
    price_per_hour: NonNegative
    tflops: Positive
    hbm_gb_per_s: Positive
    memory_gib: Positive
    gb_per_s: Positive
    called: str = ""
    """Name of the GPU in the driver."""
    mfu: Positive = 0.4
    hbm_efficiency: Positive = 0.7
    host_s: Positive = 0.003
    """The host's part of a decode step (c)."""
    trained_tokens_per_s: NonNegative = 0.0
    """Measured rate of a GPU that trains, without prompts and AdamW. It replaces mfu, if it is above 0."""
    sampled_tokens_per_s: NonNegative = 0.0
    """Measured rate of a GPU of an engine. It replaces hbm_efficiency, if it is above 0."""

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
        """One of the GPUs, for the arithmetic of memory."""
        return Gpu(self.gpu, round(self.memory_gib * memory.GIB), 0)


@dataclass(frozen=True)
class Cluster:
    """Machines, and GB/s one way between two of them. update_factor is 4 to 6 in AReaL-Hex's table 2."""

    pools: tuple[Pool, ...]
    same_kind: Positive = 1.25
    """Machines of one kind. The default is Ethernet of 10 Gbit/s."""
    across_kinds: Positive = 1.25
    """Machines of different kinds."""
    update_factor: Positive = 5.0


@dataclass(frozen=True)
class Lengths:
    """Mean tokens. `square` is the mean square of prompt and response, `longest` the longest response of a step."""

    prompt: float
    response: float
    square: float
    context: float
    """Tokens of a running request at a random time: long requests run longer."""
    longest: float

    @classmethod
    def of(cls, prompt: float, responses: Iterable[float], num: int) -> "Lengths":
        """Return the lengths of `num` responses in a step. Each has one of these lengths with equal chance."""
        r = np.sort(np.fromiter(responses, float))
        context = prompt + (r**2).mean() / (2 * r.mean())
        longest = r @ np.diff((np.arange(len(r) + 1) / len(r)) ** num)
        return cls(
            prompt,
            r.mean(),
            ((prompt + r) ** 2).mean(),
            context,
            longest,
        )

    @classmethod
    def lognormal(
        cls, prompt: float, median: float, sigma: float, *, limit: int, num: int
    ) -> "Lengths":
        """Return the lengths of `num` responses in a step that follow this law, cut at a limit."""
        normals = np.array([NormalDist().inv_cdf((i + 0.5) / QUANTILES) for i in range(QUANTILES)])
        return cls.of(prompt, np.clip(median * np.exp(sigma * normals), 1, limit), num)


@dataclass(frozen=True)
class Job:
    """A run to be planned. The planner chooses replicas and rollout_tp.

    If save_memory is auto it also chooses savings and micro-batch.
    """

    config: Config
    shape: ModelShape
    lengths: Lengths

    @property
    def responses(self) -> int:
        """Responses that are trained on in a step."""
        return self.config.groups_per_step * self.config.group_size

    @property
    def tokens(self) -> float:
        """Tokens that are sampled for a step."""
        return self.responses * self.lengths.response

    @property
    def read_tokens(self) -> float:
        """Tokens that the trainer reads in a pass over a step's batch."""
        prompts = self.config.groups_per_step * (
            self.config.group_size if self.config.share_prefix in ("off", "auto") else 1
        )
        return prompts * self.lengths.prompt + self.tokens

    @property
    def extra_passes(self) -> int:
        """Passes without gradient: the reference, and proximal log-probs or values."""
        anchors = self.config.minibatches > 1 and self.config.proximal == "recompute"
        return (self.config.kl_coef > 0) + (anchors or self.config.advantage == "gae")

    @cached_property
    def ways_to_fit(self) -> list[tuple[tuple[str, ...], int]]:
        """Savings of memory and tokens of a micro-batch, as a run tries them, the cheapest first."""
        configs = memory.ways_to_fit(self.config)
        return [*dict.fromkeys((c.save_memory, c.max_tokens_per_microbatch) for c in configs)]

    @property
    def requests(self) -> int:
        """Most requests that run at the same time. The trainer has one of 1 + α batches, if there are two."""
        return max(1, math.floor(self.responses * max(1.0, self.config.async_ratio)))


# Training


@dataclass(frozen=True)
class Training:
    """Setting of the trainer: `gpus` of each of `machines`, and a replica of the model over `shards` of them."""

    pool: Pool
    machines: int
    gpus: int
    shards: int
    save_memory: tuple[str, ...]
    microbatch: int
    stages: bool
    """True if weights are staged on its GPUs, for engines on its machines."""

    @property
    def ranks(self) -> int:
        """GPUs that train."""
        return self.machines * self.gpus

    def config(self, job: Job) -> Config:
        """Return its options."""
        return replace(
            job.config,
            replicas=self.ranks // self.shards,
            save_memory=self.save_memory,
            max_tokens_per_microbatch=self.microbatch,
        )

    def items(self, job: Job) -> list[memory.Item]:
        """Return the memory of a rank in a step."""
        needs = self.config(job), job.shape, memory.Sharing(self.ranks, self.shards, self.stages)
        return [*memory.alone_items(*needs), *memory.step_items(*needs)]


def read_sheets() -> dict[str, dict]:
    """Return the numbers of every data sheet, by the name of the GPU."""
    sheets = tomllib.loads(SHEETS.read_text(encoding="utf-8"))
    return {
        gpu: {name: value for name, value in sheet.items() if name != "source"}
        for gpu, sheet in sheets.items()
    }


def compute_s(job: Job, t: Training) -> float:
    """Return the seconds that the trainer computes in a step (F/(ranks·C))."""
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
    """Return the share of the data sheet's FLOP/s that the trainer's matrix products reach."""
    tokens = min(t.microbatch, job.read_tokens / (t.ranks * job.config.minibatches))
    return t.pool.mfu * (SHORT_MFU if tokens < SHORT_TOKENS else 1)


def num_passes(job: Job, t: Training) -> int:
    """Return the passes over a micro-batch. A backward pass counts as two, and recomputation as one."""
    return job.extra_passes + 1 + ("activations" in t.save_memory) + 2


def training_s(job: Job, cluster: Cluster, t: Training) -> float:
    """Return the seconds of the trainer for a step (t)."""
    config, pool = job.config, t.pool
    weights, trained = 2 * job.shape.num_parameters, memory.trained_parameters(config, job.shape)
    # Rings. Rings through the same shard of all replicas share a machine's link.
    across = min(pool.gb_per_s, cluster.same_kind)
    shard_link = pool.gb_per_s if t.shards <= t.gpus else across
    replica_link = (
        pool.gb_per_s if t.machines == 1 else min(across, cluster.same_kind / min(t.gpus, t.shards))
    )
    byte_s = (1 - 1 / t.shards) / (shard_link * 1e9)
    root, passes = 2 * job.shape.root_parameters, job.extra_passes
    root_gradients = 0 if config.lora_rank else 2 * root
    reductions_s = byte_s * (4 * trained - root_gradients)
    gathers_s = byte_s * (weights - root)
    replica_s = 2 * 4 * trained / t.shards * (1 - t.shards / t.ranks) / (replica_link * 1e9)
    count = config.minibatches * math.ceil(
        job.read_tokens / (t.ranks * config.minibatches * t.microbatch)
    )
    reference_passes = config.kl_coef > 0 and not config.lora_rank  # of a second model
    exchanges, root_passes = count, passes
    if "head" not in t.save_memory:
        exchanges, root_passes = config.minibatches, reference_passes
    num_gathers = count * (passes + 2)
    if "layers" not in t.save_memory:
        num_gathers = config.minibatches + count * reference_passes
    layers_s = num_gathers * gathers_s + count * reductions_s
    root_s = byte_s * (exchanges * (root + root_gradients) + count * root_passes * root)
    adamw_s = config.minibatches * ADAMW_BYTES * trained / t.shards / pool.hbm_bytes_per_s
    # for each pass shards come from the host, float32, and gradients go there
    if "optimizer" in t.save_memory:
        moved = 12 * count * job.shape.num_parameters + config.minibatches * ADAMW_BYTES * trained
        adamw_s = moved / t.shards / HOST_BYTES_PER_S
    replicas_s, publish_s = config.minibatches * replica_s, weights * byte_s
    host_s = count * job.shape.num_layers * HOST_LAYER_S * num_passes(job, t) / 3
    step_s = max(compute_s(job, t), layers_s, host_s)
    return step_s + root_s + replicas_s + adamw_s + publish_s


def trainings(job: Job, pool: Pool, machines: int, gpus: int, stages: bool) -> Iterator[Training]:
    """Yield the settings that fit on so many GPUs."""
    ranks, room = machines * gpus, memory.available_bytes(pool.device)
    for shards, savings in itertools.product(range(1, ranks + 1), job.ways_to_fit):
        if ranks % shards or (shards % gpus and gpus % shards):
            continue
        training = Training(pool, machines, gpus, shards, *savings, stages)
        if memory.total(training.items(job)) <= room:
            yield training


# Sampling


def load_s(job: Job) -> float:
    """Return the least seconds that an engine needs to load new weights."""
    return job.shape.num_tensors * LOAD_S


@dataclass(frozen=True)
class Engine:
    """An engine of `tp` GPUs with `requests` at a time (b). Numbers can be arrays, for several engines at once."""

    pool: Pool
    tp: int
    requests: float
    decode_s: float
    """Seconds of a decode step (d)."""
    rate: float
    """Tokens/s of all requests (h)."""


def exchange_s(job: Job, pool: Pool, tp: int, tokens: float) -> float:
    """Return the seconds that an engine's GPUs need to exchange their results for so many tokens."""
    bytes_s = tokens * job.shape.hidden_size * 2 / (tp * pool.gb_per_s * 1e9)
    return (tp - 1) * (LINK_LATENCY_S + bytes_s) * 4 * job.shape.num_layers


def prefill_s(job: Job, pool: Pool, tp: int) -> float:
    """Return the seconds of a prompt's prefill (p)."""
    flops = 2 * (job.shape.num_parameters - job.shape.idle_parameters) * job.lengths.prompt
    return flops / (tp * pool.flops_per_s) + exchange_s(job, pool, tp, job.lengths.prompt)


def decode_parts_s(job: Job, pool: Pool, tp: int, requests: float) -> tuple:
    """Return the seconds of a decode step: reading weights, multiplying, reading the cache, and the rest."""
    weights = 2 * job.shape.parameters_of(requests)
    active = 2 * (job.shape.num_parameters - job.shape.idle_parameters)
    cache = requests * job.lengths.context * memory.kv_bytes_per_token(job.shape, tp)
    return (
        weights / tp / pool.hbm_bytes_per_s,
        active * requests / (tp * pool.tflops * 1e12 * DECODE_MFU),
        cache / pool.hbm_bytes_per_s,
        pool.host_s + exchange_s(job, pool, tp, requests),
    )


def make_engine(job: Job, pool: Pool, tp: int, requests: float) -> Engine:
    """Return an engine with its rate. It reads weights while it multiplies."""
    weights_s, products_s, cache_s, rest_s = decode_parts_s(job, pool, tp, requests)
    decode_s = np.maximum(weights_s, products_s) + cache_s + rest_s
    response = job.lengths.response
    rate = requests * response / (response * decode_s + requests * prefill_s(job, pool, tp))
    return Engine(pool, tp, requests, decode_s, rate)


def largest_engine(job: Job, pool: Pool, tp: int, room: float | None = None) -> Engine | None:
    """Return an engine with as many requests as max_running_requests and the KV cache allow; None if it does not fit.

    `room` is the memory of a GPU for the engine, bytes. By default the engine has the GPU for itself.
    """
    if room is None:
        share = job.config.gpu_memory_utilization or SHARE_ALONE
        room = min(share * pool.device.total_bytes, memory.available_bytes(pool.device))
    kv_bytes = room - memory.total(memory.engine_items(job.config, job.shape, tp))
    tokens = kv_bytes / memory.kv_bytes_per_token(job.shape, tp)
    if tokens < job.config.max_sequence_tokens:
        return None
    most = min(job.config.max_running_requests, job.requests, int(tokens // job.lengths.context))
    return make_engine(job, pool, tp, most)


def calibrated(job: Job, pool: Pool, requests: float | None = None) -> Pool:
    """Return the pool with the mfu and hbm_efficiency of its measured rates, and without these rates.

    The rates are of the job, with its save_memory and rollout_tp. The engine has so many requests, by default as many
    as fit. Raises ValueError for a rate that no efficiency gives.
    """
    mfu, efficiency, tp = pool.mfu, pool.hbm_efficiency, job.config.rollout_tp
    if pool.trained_tokens_per_s:
        budget = job.config.max_tokens_per_microbatch
        t = Training(pool, 1, 1, 1, job.config.save_memory, budget, False)
        mfu *= compute_s(job, t) * pool.trained_tokens_per_s / job.tokens
    pool = replace(pool, mfu=mfu, trained_tokens_per_s=0.0)
    rate = tp * pool.sampled_tokens_per_s
    if rate:
        largest = largest_engine(job, pool, tp)
        b = requests or (largest.requests if largest else 1)
        weights_s, products_s, cache_s, rest_s = decode_parts_s(job, pool, tp, b)
        left_s = b / rate - b * prefill_s(job, pool, tp) / job.lengths.response - rest_s
        if left_s <= products_s:
            raise ValueError(
                f"{pool.name}: sampled_tokens_per_s {pool.sampled_tokens_per_s:g} is too high. With {b:.3g} requests a "
                f"step takes {b / rate:.3g} s, and all but memory {rest_s + products_s:.3g} s. Lower it, or host_s"
            )
        # products hide the reading of weights, or are hidden by it
        efficiency *= max((weights_s + cache_s) / left_s, cache_s / (left_s - products_s))
    return replace(pool, hbm_efficiency=efficiency, sampled_tokens_per_s=0.0)


# Plans


@dataclass(frozen=True)
class Site:
    """GPUs that can sample: `gpus` on each of `machines`. All engines of a site have the same tp."""

    pool: Pool
    machines: int
    gpus: int
    trains: bool
    """True beside the trainer. All its machines then have equally many engines."""
    update_s: float
    """Seconds until new weights reach the site."""
    engines: tuple[Engine, ...]
    """The engine of each tp, with as many requests as it has room for."""

    @cached_property
    def choices(self) -> np.ndarray:
        """Choices [choices, 3] of an engine's tp, the number of engines, and the requests that fit into one.

        No engine comes first, then each tp with rising numbers.
        """
        step = self.machines if self.trains else 1
        rows = [(1, 0, 0.0)]
        for engine in self.engines:
            most = self.gpus // engine.tp * self.machines
            rows += [(engine.tp, n, engine.requests) for n in range(step, most + 1, step)]
        return np.array(rows)


@dataclass(frozen=True)
class Split:
    """GPUs that train, and sites that can sample."""

    job: Job
    training: Training
    training_s: float
    sites: tuple[Site, ...]
    colocate: str | None = None
    """Mode of sharing a GPU between trainer and engine, if they do. They then take turns for every α."""

    @property
    def trainer(self) -> tuple:
        """GPUs that train. Splits with the same trainer are alternatives of one plan."""
        t = self.training
        return t.pool, t.machines, t.gpus, self.colocate is None

    @property
    def alpha(self) -> float:
        """The async_ratio that has an effect."""
        return 0.0 if self.colocate else self.job.config.async_ratio

    def step_s(self, rate, update_s, tail_s):
        """Return about the seconds of a step with these engines' tokens/s, and seconds of update and tail."""
        generation_s = self.job.tokens / rate + update_s
        return least_step_s(generation_s, self.training_s, self.alpha, tail_s)


@dataclass(frozen=True)
class Plan:
    """A split with its engines, and the times of a step."""

    split: Split
    engines: tuple[tuple[Site, Engine, int], ...]

    @property
    def rate(self) -> float:
        """Tokens/s of all engines."""
        return sum(engine.rate * count for _, engine, count in self.engines)

    @property
    def generation_s(self) -> float:
        """Seconds that the engines need to sample the tokens of a step (g)."""
        return self.split.job.tokens / self.rate

    @property
    def update_s(self) -> float:
        """Seconds of a weight update, of the slowest site (u)."""
        return max(load_s(self.split.job), *(site.update_s for site, _, _ in self.engines))

    @property
    def tail_s(self) -> float:
        """Seconds from the end of a mean response to the end of a step's longest one."""
        job = self.split.job
        return float(min(tail_s(job, engine.pool, engine.tp) for _, engine, _ in self.engines))

    @property
    def step_s(self) -> float:
        """Seconds of a step, about."""
        return float(self.split.step_s(self.rate, self.update_s, self.tail_s))

    @property
    def most_step_s(self) -> float:
        """Seconds of a step at most, if the slowest engine has its longest response."""
        split = self.split
        longest_s = split.job.lengths.longest * max(e.decode_s for _, e, _ in self.engines)
        busy_s = self.generation_s + self.update_s
        return most_step_s(busy_s, split.training_s, longest_s, split.alpha)

    @property
    def sampling_gpus(self) -> list[tuple[Pool, int]]:
        """GPUs that sample and do not train."""
        engines = () if self.split.colocate else self.engines
        return [(engine.pool, engine.tp * count) for _, engine, count in engines]

    @property
    def cost_per_hour(self) -> float:
        """Price of the GPUs in use. Idle GPUs are free."""
        used = [(self.split.training.pool, self.split.training.ranks), *self.sampling_gpus]
        return sum(pool.price_per_hour * gpus for pool, gpus in used)


def tail_s(job: Job, pool: Pool, tp: int) -> float:
    """Return the seconds that a step's longest response decodes on, as the only one, after a mean one has ended."""
    alone = make_engine(job, pool, tp, 1)
    return (job.lengths.longest - job.lengths.response) * alone.decode_s


def fill(requests: int, rooms: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return the requests of each engine [combinations, sites], if the sites have so many engines.

    The controller gives a request to the engine that has the fewest. So all have equally many, or as many as fit.
    """
    levels, left, engines_left = np.zeros_like(rooms), float(requests), counts.sum(1)
    for places in np.argsort(rooms, axis=1).T[..., None]:
        room, count = (np.take_along_axis(a, places, 1)[:, 0] for a in (rooms, counts))
        level = np.minimum(room, left / np.maximum(engines_left, 1))
        np.put_along_axis(levels, places, level[:, None], 1)
        left, engines_left = left - count * level, engines_left - count
    return levels


def evaluate(split: Split, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return seconds of a step and price per hour of combinations [rows, sites] of the sites' choices, by index.

    A combination takes infinitely long without an engine, or with more engines than requests. The price has a small
    part for each GPU, because fewer GPUs are better at the same price.
    """
    job = split.job
    choices = np.stack([site.choices[i] for site, i in zip(split.sites, rows.T, strict=True)], 1)
    tps, counts, rooms = np.moveaxis(choices, 2, 0)
    levels = fill(job.requests, rooms, counts)
    rate, price = np.zeros((2, len(rows)))
    update_s = np.full(len(rows), load_s(job))
    tail = np.full(len(rows), np.inf)
    for site, tp, count, level in zip(split.sites, tps.T, counts.T, levels.T, strict=True):
        rate += count * make_engine(job, site.pool, tp, level).rate
        price += count * tp * (site.pool.price_per_hour + 1e-3)
        update_s = np.maximum(update_s, np.where(count, site.update_s, 0))
        tail = np.minimum(tail, np.where(count, tail_s(job, site.pool, tp), np.inf))
    is_possible = (rate > 0) & (counts.sum(1) <= job.requests)
    step_s = split.step_s(np.where(is_possible, rate, 1.0), update_s, tail)
    return np.where(is_possible, step_s, np.inf), price


def climb(split: Split, best: np.ndarray, limit_s: float) -> np.ndarray:
    """Return the best combination [sites]: the fastest, or within a finite limit the cheapest.

    All are tried if there are few. Otherwise some choices of each site are, evenly spread and beside the best, until no
    better combination is found.
    """
    lengths = [len(site.choices) for site in split.sites]
    per_site = max(8, int(MOST_COMBINATIONS ** (1 / len(lengths))))
    least = math.inf
    while True:
        grids = []
        for index, length in zip(best, lengths, strict=True):
            spread = np.linspace(0, length - 1, min(length, per_site)).round()
            near = np.arange(index - BESIDE, index + BESIDE + 1)
            grids.append(np.unique([*spread, *near.clip(0, length - 1)]).astype(int))
        rows = np.stack(np.meshgrid(*grids, indexing="ij"), -1).reshape(-1, len(lengths))
        step_s, price = evaluate(split, rows)
        values = step_s if limit_s == math.inf else np.where(step_s <= limit_s, price, np.inf)
        if not values.min() < least:
            return best
        least, best = values.min(), rows[values.argmin()]


def solve(split: Split, limit_s: float | None = None) -> Plan | None:
    """Return the cheapest plan within a limit on the step; None if no plan keeps it.

    Without a limit it is the cheapest plan that is as fast as the fastest, up to GAP.
    """
    fullest = np.array([len(site.choices) - 1 for site in split.sites])
    fastest = climb(split, fullest, math.inf)
    least_s = evaluate(split, fastest[None])[0].item()
    limit_s = least_s * (1 + GAP) if limit_s is None else limit_s * (1 + 1e-6)
    is_kept = least_s <= limit_s < math.inf
    return make_plan(split, climb(split, fastest, limit_s)) if is_kept else None


def make_plan(split: Split, row: Sequence[int]) -> Plan:
    """Return the plan with these choices of the sites, by index."""
    choices = np.stack([site.choices[i] for site, i in zip(split.sites, row, strict=True)])
    tps, counts, rooms = choices.T
    levels = fill(split.job.requests, rooms[None], counts[None])[0]
    engines = tuple(
        (site, make_engine(split.job, site.pool, int(tp), float(level)), int(count))
        for site, tp, count, level in zip(split.sites, tps, counts, levels, strict=True)
        if count
    )
    return Plan(split, engines)


def splits(job: Job, cluster: Cluster) -> Iterator[Split]:
    """Yield every choice of GPUs that train, with the fastest training on them."""
    tps = [tp for tp in TPS if memory.can_split(job.shape, tp)]
    engines = {
        pool: [e for tp in tps if tp <= pool.gpus and (e := largest_engine(job, pool, tp))]
        for pool in cluster.pools
    }
    weights_gb = 2 * job.shape.num_parameters / 1e9

    def site(pool: Pool, machines: int, gpus: int, trains: bool, update_s: float) -> Site:
        fitting = tuple(engine for engine in engines[pool] if engine.tp <= gpus)
        return Site(pool, machines, gpus, trains, update_s, fitting)

    for pool in cluster.pools:
        yield from shared_splits(job, pool)
        for machines, gpus in itertools.product(range(1, pool.count + 1), range(1, pool.gpus + 1)):
            if not _can_share(job.config, machines):
                continue
            sites = []
            for other in cluster.pools:
                link = cluster.same_kind if other.gpu == pool.gpu else cluster.across_kinds
                count = other.count - machines * (other is pool)
                update_s = cluster.update_factor * weights_gb / link
                sites.append(site(other, count, other.gpus, False, update_s))
            beside = site(pool, machines, pool.gpus - gpus, True, weights_gb / pool.gb_per_s)
            for stages in (False, True)[: 1 + (gpus < pool.gpus)]:
                timed = [
                    (training_s(job, cluster, training), training)
                    for training in trainings(job, pool, machines, gpus, stages)
                ]
                usable = tuple(s for s in [beside] * stages + sites if s.machines and s.engines)
                if timed and usable:
                    seconds, training = min(timed, key=lambda pair: pair[0])
                    yield Split(job, training, seconds, usable)


def _can_share(config: Config, machines: int) -> bool:
    """Return whether the machines can share a step's groups evenly."""
    try:
        check_shares(replace(config, replicas=1), machines, machines)
    except ValueError:
        return False
    return True


def shared_splits(job: Job, pool: Pool) -> Iterator[Split]:
    """Yield splits with trainer and engine on one GPU, all other GPUs idle. At α = 0 the engine sleeps in a step."""
    update_s = 4 * job.shape.num_parameters / pool.hbm_bytes_per_s
    colocate = "sleep" if job.config.async_ratio == 0 else "share"
    for savings in job.ways_to_fit:
        t = Training(pool, 1, 1, 1, *savings, True)
        config = replace(t.config(job), colocate=colocate)
        try:
            share, _, _ = memory.plan_shared(config, job.shape, pool.device)
        except ValueError:
            continue
        engine = largest_engine(job, pool, 1, share * pool.device.total_bytes)
        if engine:
            site = Site(pool, 1, 1, True, update_s, (engine,))
            seconds = training_s(job, Cluster((pool,), 1.0, 1.0), t)
            yield Split(job, t, seconds, (site,), colocate)


def plan(job: Job, cluster: Cluster, tokens_per_s: float | None = None) -> list[Plan]:
    """Return up to NUM_PLANS plans with the least step, or with `tokens_per_s` the cheapest, the best first.

    There is one plan for each choice of GPUs that train. Raises ValueError, with the arithmetic, if there is no plan.
    """
    cluster = replace(cluster, pools=tuple(calibrated(job, pool) for pool in cluster.pools))
    limit_s = tokens_per_s and job.tokens / tokens_per_s
    candidates = [*splits(job, cluster)]
    if not candidates:
        raise ValueError(_refusal(job, cluster))
    plans = [solved for split in candidates if (solved := solve(split, limit_s))]
    if not plans:
        fastest = job.tokens / plan(job, cluster)[0].step_s
        raise ValueError(f"no plan has {tokens_per_s:g} tokens/s; the fastest has {fastest:g}")
    best: dict[tuple, Plan] = {}
    plans.sort(key=lambda plan: (0 if limit_s else plan.step_s, plan.cost_per_hour))
    for solved in plans:
        best.setdefault(solved.split.trainer, solved)
    return [*best.values()][:NUM_PLANS]


def of_placement(job: Job, cluster: Cluster, placement: Placement) -> Plan:
    """Return the plan that gives all machines, of one kind, this placement."""
    (pool,), config, weights = cluster.pools, job.config, 2 * job.shape.num_parameters
    ranks, worker = len(placement.trainer_gpus), placement.workers[0]
    num_shards = ranks * pool.count // config.replicas
    stages, tokens = placement.transport != "shm", config.max_tokens_per_microbatch
    training = Training(pool, pool.count, ranks, num_shards, config.save_memory, tokens, stages)
    # by ipc the engine copies what it reads, by shm both ends do
    copy_s = {
        "nccl": len(placement.workers) * weights / (pool.gb_per_s * 1e9),
        "ipc": 2 * weights / pool.hbm_bytes_per_s,
        "shm": 2 * weights / HOST_BYTES_PER_S,
    }[placement.transport]
    room = colocate = None
    if worker.shared_with_rank is not None:
        room = worker.gpu_memory_utilization * pool.device.total_bytes
        colocate = config.colocate
    engine = largest_engine(job, pool, config.rollout_tp, room)
    gpus = len(placement.workers) * config.rollout_tp
    site = Site(pool, pool.count, gpus, True, copy_s, (engine,))
    split = Split(job, training, training_s(job, cluster, training), (site,), colocate)
    return make_plan(split, [len(placement.workers)])


def _refusal(job: Job, cluster: Cluster) -> str:
    """Return why no plan fits: the least need of each pool's largest trainer, per rank, and of its largest engine."""
    texts = []
    for pool in cluster.pools:
        ranks, room = pool.count * pool.gpus, memory.available_bytes(pool.device) / memory.GIB
        t = Training(pool, pool.count, pool.gpus, ranks, *job.ways_to_fit[-1], False)
        tp = max(tp for tp in TPS if tp <= pool.gpus and memory.can_split(job.shape, tp))
        engine = memory.engine_items(job.config, job.shape, tp)
        texts.append(
            f"{pool.name} has {room:.1f} GiB; one of {ranks} trainer ranks needs {memory.listed(t.items(job))}; "
            f"a GPU of a tp {tp} engine needs {memory.listed(engine)}"
        )
    return f"the model fits on no GPUs to train and to sample: {'; '.join(texts)}; take more GPUs, or larger ones"
