"""Memory that trainer and engine need, computed from the model's shape before anything is loaded. Pure.

Weights, gradients, optimizer state, staging buffers and KV cache are exact. Activations are an estimate, from the
tensors that transformers' decoder layers save for the backward pass. Contexts, graphs and workspaces have usual sizes.
`MARGIN` covers these estimates.
"""

import itertools
import math
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from asyncrl.cluster.gpus import Gpu
from asyncrl.cluster.placement import SHARE_ALONE, Placement
from asyncrl.config import Config
from asyncrl.engine.vllm_setup import ENGINE_STEP_TOKENS
from extras.planning.shape import ModelShape

GIB = 2**30
MARGIN = 0.04
"""Share of the GPU that stays free: fragmentation, rounding, and the error of the estimates."""
CONTEXT_BYTES = int(1.2 * GIB)
"""A CUDA context, its kernels, cuBLAS workspaces and NCCL's buffers, per process."""
GRAPH_BYTES = GIB
"""CUDA graphs of an engine."""
ERROR = 0.25
"""Largest relative excess of a step over the GPU. A run with more is refused."""
SPARE = 0.05
"""Share of the GPU that an engine gets beyond its need, if it is free, because its overheads are estimates."""
LINKS_BYTES = 2 * GIB
"""NCCL's groups of the rank that sends weights to engines, and gaps of its allocator. Assumed, not measured."""
PULLED_COPIES = 5
"""Versions of the weights for hosts that pull: three are kept, one is announced, one is being made."""
CHUNK_ROWS, KEPT_LOGITS = 1024, 2**28
"""Equal to the constants of asyncrl/trainer/logprobs.py. That file imports torch."""
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
WAYS_OUT = (
    "try --save-memory head activations optimizer, a lower --max-tokens-per-microbatch, a lower "
    "--max-running-requests, --weight-sync shm, which stages in host memory, --colocate sleep at α = 0, a GPU that no "
    "other process uses, or a smaller model"
)


@dataclass(frozen=True)
class Item:
    """One use of memory."""

    what: str
    num_bytes: float
    how: str
    """The arithmetic."""

    def __str__(self) -> str:
        return f"{self.what} {self.num_bytes / GIB:.2f} GiB ({self.how})"


@dataclass(frozen=True)
class Sharing:
    """Ranks of the trainer on all nodes, and limits of the check."""

    num_ranks: int = 1
    """Ranks that share a step's groups."""
    num_shards: int = 1
    """Ranks that share one replica of the model."""
    stages: bool = True
    """True if weights are staged on rank 0's GPU, for ipc or nccl."""
    is_strict: bool = False
    """True if a step must fit by the estimates, too. An engine on the same GPU must then have room for a quarter of its
    requests. Responses rarely have the longest allowed length."""
    host_bytes: float = math.inf
    """Host memory for the run. Infinite by default, because a planned machine need not be here."""


def total(items: list[Item]) -> float:
    """Return the bytes of all items."""
    return sum(item.num_bytes for item in items)


# The trainer


def trained_parameters(config: Config, shape: ModelShape) -> int:
    """Return the parameters of the optimizer: all, or with LoRA only the adapters of every linear layer.

    Experts of a mixture have no adapters; see asyncrl/trainer/lora.py.
    """
    if not config.lora_rank:
        return shape.num_parameters
    hidden, wide = shape.hidden_size, 0 if shape.expert_parameters else shape.intermediate_size
    queries = shape.num_attention_heads * shape.head_dim
    keys = shape.num_key_value_heads * shape.head_dim
    return (
        config.lora_rank
        * shape.num_layers
        * (2 * (hidden + queries) + 2 * (hidden + keys) + 3 * (hidden + wide) * (wide > 0))
    )


def resident_items(config: Config, shape: ModelShape, sharing: Sharing) -> list[Item]:
    """Return the memory of one trainer rank between two steps.

    The optimizer is counted as AdamW for every --optimizer.
    """
    million, trained = f"{shape.num_parameters / 1e6:.0f} M", trained_parameters(config, shape)
    num_shards = sharing.num_shards
    share = f"{million} parameters / {num_shards} ranks"
    gathered = Item("gathering weights", 2 * shape.largest_parameter, "2 B × the largest parameter")
    items = [Item("CUDA context", CONTEXT_BYTES, "usual"), gathered]
    if "optimizer" not in config.save_memory:
        of_trained = f"{trained / 1e6:.0f} M parameters / {num_shards} ranks × (4 + 8) B"
        items.append(Item("weights and AdamW", 12 * trained / num_shards, of_trained))
        if config.lora_rank or config.kl_coef > 0:
            what = "frozen weights" if config.lora_rank else "reference model"
            items.append(Item(what, 2 * shape.num_parameters / num_shards, f"{share} × 2 B"))
    if sharing.stages:
        items.append(
            Item("staging buffer", 2 * shape.num_parameters, f"{million} parameters × 2 B")
        )
    return items


def alone_items(config: Config, shape: ModelShape, sharing: Sharing) -> list[Item]:
    """Return the memory of one trainer rank between two steps on a GPU that it does not share."""
    links = [Item("NCCL's groups to engines", LINKS_BYTES, "assumed until measured")]
    return [*resident_items(config, shape, sharing), *links * sharing.stages]


def step_items(config: Config, shape: ModelShape, sharing: Sharing) -> list[Item]:
    """Return the additional memory of one trainer rank at the peak of a step, in the backward pass.

    Fused AdamW has no temporaries. An offloaded one runs in host memory, where the gradients then are, too. With
    `layers` other layers' gathered weights are freed before. extras/planning/tests/test_memory_of_a_step.py counts all
    this.
    """
    backward = _pass_items(config, shape, sharing.num_ranks)
    if "optimizer" in config.save_memory:
        return backward
    sharded = trained_parameters(config, shape) - whole_gradients(config, shape)
    how = f"{sharded / 1e6:.0f} M weights / {sharing.num_shards} ranks × 4 B"
    return [Item("gradients", 4 * sharded / sharing.num_shards, how), *backward]


def whole_gradients(config: Config, shape: ModelShape) -> int:
    """Return the parameters of embedding and head if a rank keeps their gradients whole until an update's end."""
    return 0 if "head" in config.save_memory or config.lora_rank else shape.root_parameters


def _pass_items(config: Config, shape: ModelShape, num_ranks: int) -> list[Item]:
    """Return the memory of a pass over one micro-batch at its higher peak: in the head, or in a layer."""
    tokens, per_layer, hidden = (
        microbatch_tokens(config, num_ranks),
        saved_bytes_per_token(shape, config.compile is not False),
        shape.hidden_size,
    )
    is_recomputed = "activations" in config.save_memory
    of_layer, head = 2 * hidden if is_recomputed else per_layer, 2 * shape.largest_parameter
    in_head = _head_item(config, shape, tokens)
    wide = tokens * (per_layer * is_recomputed + 4 * (hidden + shape.intermediate_size))
    in_layer = Item(
        "in a layer",
        wide + 10 * shape.layer_parameters,
        f"{tokens} tokens, and 10 B × its parameters",
    )
    how = f"{tokens} tokens × {shape.num_layers} layers × {of_layer} B, estimated"
    root = Item("head and its gradient", 2 * head, "2 × 2 B × the largest parameter")
    if "head" not in config.save_memory:
        # its gradient of this micro-batch, and the sum of the earlier ones
        kept_bytes = 2 * shape.root_parameters + 4 * whole_gradients(config, shape) + head
        how_root = f"{shape.root_parameters / 1e6:.0f} M parameters, 2 B, and 4 B of gradients"
        root = Item("embedding and head", kept_bytes, how_root)
    items = [
        root,
        Item("activations", tokens * shape.num_layers * of_layer, how),
        max(in_head, in_layer, key=lambda item: item.num_bytes),
    ]
    if "layers" not in config.save_memory:
        kept = shape.num_parameters - shape.root_parameters
        items.append(Item("gathered layers", 2 * kept, f"{kept / 1e6:.0f} M parameters × 2 B"))
    # torch makes a bias of the mask in every layer, and keeps it for the backward pass
    if shape.needs_mask:
        copies = 1 + 2 * (1 if is_recomputed else shape.num_layers)
        mask = copies * tokens * config.max_sequence_tokens
        items.append(Item("attention mask", mask, f"{copies} B × tokens × longest sequence"))
    return items


def _head_item(config: Config, shape: ModelShape, tokens: int) -> Item:
    """Return the memory of the head in a pass over so many tokens; see asyncrl/trainer/logprobs.py."""
    rows, row_bytes = min(tokens, CHUNK_ROWS), 4 * shape.vocab_size
    num_kept_chunks = max(1, KEPT_LOGITS // (CHUNK_ROWS * shape.vocab_size))
    kept = row_bytes * (min(tokens, num_kept_chunks * CHUNK_ROWS) - rows)
    copies = 6 if config.top_p < 1 else 4 if config.top_k or config.min_p else 3
    chunk = row_bytes * rows
    in_chunk = max(copies * chunk, 2 * chunk + 2 * shape.largest_parameter)
    num_bytes = 10 * tokens * shape.hidden_size + kept + in_chunk
    return Item("in the head", num_bytes, f"{rows} rows of logits")


def ways_to_fit(config: Config) -> list[Config]:
    """Return the options, or if --save-memory is auto the options with all combinations of savings, cheapest first.

    The cheapest saving gathers layers in each micro-batch. The next one gathers embedding and head, too. Then come
    smaller micro-batches, and weights staged in host memory if --weight-sync is auto. Recomputation is next, and the
    optimizer in host memory is last.
    """
    if "auto" not in config.save_memory:
        return [config]
    savings = ((), ("activations",), ("activations", "optimizer"))
    syncs = dict.fromkeys(
        (config.weight_sync, "shm" if config.weight_sync == "auto" else config.weight_sync)
    )
    return [
        replace(
            config, save_memory=freed + save, weight_sync=sync, max_tokens_per_microbatch=tokens
        )
        for save, sync, tokens, freed in itertools.product(
            savings, syncs, budgets(config), ((), ("layers",), ("layers", "head"))
        )
    ]


def budgets(config: Config) -> list[int]:
    """Return the micro-batches to try, tokens: the given one, its halves, and one whole sequence."""
    most, least = config.max_tokens_per_microbatch, config.max_sequence_tokens
    return [*(most >> i for i in range(32) if most >> i > least), least]


def microbatch_tokens(config: Config, num_ranks: int) -> int:
    """Return the tokens of one pass: the budget, or all tokens of an update on a rank."""
    sequences = -(-config.groups_per_step * config.group_size // (config.minibatches * num_ranks))
    return min(config.max_tokens_per_microbatch, sequences * config.max_sequence_tokens)


def saved_bytes_per_token(shape: ModelShape, is_compiled: bool) -> int:
    """Return the bytes that one layer keeps of one token for the backward pass: bfloat16, float32 in norms.

    A layer keeps two norms of the hidden state, norms of queries and keys, queries, keys and values. It also keeps the
    attention output with its sums, and four tensors of the feed-forward layer. With a mask keys and values are kept
    once per query head. A compiled layer computes the norms' float32 and one tensor of the feed-forward layer again. A
    mixture keeps inputs and outputs of experts, too. Grouped products need the inputs. Gradients of the router's
    weights need the outputs.
    """
    queries = shape.num_attention_heads * shape.head_dim
    keys = shape.num_key_value_heads * shape.head_dim
    routed = round(4 * shape.experts_per_token * shape.hidden_size)
    beside = 16 * shape.hidden_size + 8 * shape.intermediate_size + routed
    if shape.needs_mask:
        return beside + 16 * queries + 6 * keys
    sums = 4 * (2 * shape.num_attention_heads + shape.num_key_value_heads + 2)
    if is_compiled:
        dense = 8 * shape.hidden_size + 6 * shape.intermediate_size
        return dense + routed + 6 * (queries + keys) + sums
    return beside + 10 * (queries + keys) + sums


# The host


def host_items(
    config: Config, shape: ModelShape, sharing: Sharing, placement: Placement
) -> list[Item]:
    """Return the host memory of a run's tensors on the first machine. Only this machine has a placement."""
    trained, weights = trained_parameters(config, shape), 2 * shape.num_parameters
    held, buffers = config.publish_delay, 2 * (placement.transport == "shm")
    offloads, has_frozen = "optimizer" in config.save_memory, config.lora_rank or config.kl_coef
    pulled = PULLED_COPIES * (config.listen is not None)
    local_share = len(placement.trainer_gpus) / sharing.num_shards
    local_parameters = trained * local_share
    saves_all = config.save == "all"
    items = [
        Item(
            "copy of the training state",
            12 * local_parameters * saves_all,
            "12 B × trained parameters of this machine",
        ),
        Item(
            "a checkpoint that is written",
            (1 + saves_all) * weights,
            f"{2 * (1 + saves_all)} B × parameters",
        ),
        Item(
            "snapshots of --certificate",
            (2 * (config.max_staleness + 2) + 4) * local_parameters * (config.certificate > 0),
            "2 B for each version × trained parameters of this machine, and 4 B in a check",
        ),
        Item("offloaded weights", 16 * local_parameters * offloads, "16 B, the same"),
        Item(
            "offloaded frozen weights",
            weights * local_share * (offloads and has_frozen > 0),
            "2 B × parameters of this machine",
        ),
        Item(
            "frozen weights for checkpoints", weights * (config.lora_rank > 0), "2 B × parameters"
        ),
        Item("weights for engines", buffers * weights, "two buffers of 2 B × parameters"),
        Item(
            "versions held back",
            (held + 1) * (held > 0) * weights,
            f"{held + 1}: the newest, and {held} of --publish-delay",
        ),
        Item("weights for hosts that pull", pulled * weights, f"{pulled} versions"),
    ]
    return [item for item in items if item.num_bytes]


def check_host(config: Config, shape: ModelShape, sharing: Sharing, placement: Placement) -> str:
    """Return the arithmetic of a machine's host memory. Raises ValueError, with it, if the machine has too little."""
    items = host_items(config, shape, sharing, placement)
    line = f"host memory of a machine: {listed(items)}"
    if total(items) > sharing.host_bytes:
        raise ValueError(
            f"the host has {sharing.host_bytes / GIB:.1f} GiB free, and the kernel would kill the run. Use more "
            f"machines, a smaller model or --lora-rank, or keep less there. {line}"
        )
    return line


def free_host_bytes() -> float:
    """Return the free host memory of this process: of the machine, or of its container."""
    limit = CGROUP_LIMIT.read_text().strip() if CGROUP_LIMIT.exists() else "max"
    return min(psutil.virtual_memory().available, math.inf if limit == "max" else int(limit))


# The engine


def engine_items(config: Config, shape: ModelShape, tp: int) -> list[Item]:
    """Return the memory of one GPU of an engine without its KV cache."""
    million = f"{shape.num_parameters / 1e6:.0f} M"
    sampled = 16 * config.max_running_requests * shape.vocab_size
    widest = 2 * ENGINE_STEP_TOKENS * (4 * shape.intermediate_size // tp + 8 * shape.hidden_size)
    return [
        Item("CUDA context and graphs", CONTEXT_BYTES + GRAPH_BYTES, "usual"),
        Item("weights", 2 * shape.num_parameters / tp, f"{million} parameters × 2 B / {tp} GPUs"),
        Item(
            "logits", sampled, f"{config.max_running_requests} requests × {shape.vocab_size} × 16 B"
        ),
        Item("a step", widest, f"{ENGINE_STEP_TOKENS} tokens, estimated"),
        Item(
            "a weight update",
            2 * 2 * shape.largest_parameter + 2**30,
            "a chunk and the largest parameter, twice",
        ),
    ]


def kv_bytes_per_token(shape: ModelShape, tp: int) -> int:
    """Return the bytes of one token's keys and values in all layers, bfloat16, on one of `tp` GPUs."""
    heads = -(-shape.num_key_value_heads // tp)
    return 2 * 2 * shape.num_layers * heads * shape.head_dim


# Together


def plan_shared(
    config: Config, shape: ModelShape, gpu: Gpu, sharing: Sharing = Sharing()
) -> tuple[float, int | None, str]:
    """Divide a GPU between a trainer rank and an engine.

    The engine gets a KV cache for all running requests at full length, or the rest of the GPU. The cache has room for
    one sequence at least. Returns its share of the GPU's memory, the bytes of its KV cache, and the arithmetic as text.
    With gpu_memory_utilization vLLM decides on the KV cache. Otherwise raises ValueError, with the arithmetic, if the
    parts do not fit.
    """
    resident = resident_items(config, shape, sharing)
    step = step_items(config, shape, sharing)
    engine, sleeps = engine_items(config, shape, 1), config.colocate == "sleep"
    room = available_bytes(gpu) - total(resident) - (0 if sleeps else total(step))
    least = -(-config.max_running_requests // 4) if sharing.is_strict else 1
    kv = _kv_cache(config, shape, room - total(engine), least)
    needs = {
        "trainer, always": resident,
        "trainer, in a step": step,
        "engine": engine,
        "KV cache": [kv],
    }
    lines = [_gpu_line(gpu), *(f"  {who}: {listed(items)}" for who, items in needs.items())]
    short = total([*engine, kv]) - room
    if sleeps:
        lines.append("  the engine sleeps in a step and gives up all but its context and graphs")
        short = max(
            short, total([*resident, *step]) + CONTEXT_BYTES + GRAPH_BYTES - available_bytes(gpu)
        )
    if config.gpu_memory_utilization is not None:
        if short > 0 or config.gpu_memory_utilization * gpu.total_bytes > room:
            lines.append(
                "  warning: by this arithmetic --gpu-memory-utilization leaves too little for the trainer"
            )
        return config.gpu_memory_utilization, None, "\n".join(lines)
    if short > 0:
        raise ValueError(_refusal(lines, short))
    share = (total([*engine, kv]) + min(-short, SPARE * gpu.total_bytes)) / gpu.total_bytes
    # three digits, so that the printed share is the one that is used
    return min(1.0, math.ceil(1000 * share) / 1000), int(kv.num_bytes), "\n".join(lines)


def _kv_cache(config: Config, shape: ModelShape, room: float, least: int) -> Item:
    """Return the cache for as many running requests at full length as fit, but at least for `least`."""
    sequence_bytes = config.max_sequence_tokens * kv_bytes_per_token(shape, 1)
    sequences = max(least, min(config.max_running_requests, int(room // sequence_bytes)))
    how = f"{sequences} of {config.max_running_requests} sequences × {config.max_sequence_tokens} tokens"
    return Item("KV cache", sequences * sequence_bytes, f"{how} × {kv_bytes_per_token(shape, 1)} B")


def check_trainer(config: Config, shape: ModelShape, gpu: Gpu, sharing: Sharing) -> str:
    """Return the arithmetic of a trainer rank that has a GPU for itself.

    Raises ValueError if the trainer's state does not fit, or if a step needs more than ERROR beyond the GPU. A smaller
    excess is only a warning, because activations are an estimate, unless the sharing is strict.
    """
    resident = alone_items(config, shape, sharing)
    step = step_items(config, shape, sharing)
    lines = [
        _gpu_line(gpu),
        f"  trainer rank 0, always: {listed(resident)}",
        f"  trainer rank 0, in a step: {listed(step)}",
    ]
    needed, error = total([*resident, *step]), 0.0 if sharing.is_strict else ERROR
    lines.append(f"  together: {needed / GIB:.2f} of {available_bytes(gpu) / GIB:.2f} GiB")
    if (short := max(total(resident), needed / (1 + error)) - available_bytes(gpu)) > 0:
        raise ValueError(_refusal(lines, short))
    if needed > available_bytes(gpu):
        lines.append(f"  warning: a step may not fit; {WAYS_OUT}")
    return "\n".join(lines)


def plan_alone(config: Config, shape: ModelShape, gpu: Gpu) -> tuple[int | None, str]:
    """Return the bytes of the KV cache of an engine that has GPUs for itself, and the arithmetic as text.

    This GPU is the fullest of them. By default vLLM would fill its whole share with keys and values. An update of the
    weights would then have no room. The cache is for all running requests at full length, or the rest. With
    gpu_memory_utilization vLLM decides, and the bytes are None. Raises ValueError if there is no room for one sequence.
    """
    engine = engine_items(config, shape, config.rollout_tp)
    kv_one = config.max_sequence_tokens * kv_bytes_per_token(shape, config.rollout_tp)
    share = config.gpu_memory_utilization or SHARE_ALONE
    kv = min(share * gpu.total_bytes, available_bytes(gpu)) - total(engine)
    number = "a sequence"
    kv_of_all = config.max_running_requests * kv_one
    if config.gpu_memory_utilization is None and kv_of_all < kv:
        kv = kv_of_all
        number = f"for each of {config.max_running_requests} sequences"
    lines = [
        _gpu_line(gpu),
        f"  engine, {share:.0%}: {listed(engine)}; KV cache {max(kv, 0) / GIB:.2f} GiB, {kv_one / GIB:.2f} {number}",
    ]
    if kv < kv_one:
        raise ValueError(_refusal(lines, kv_one - kv))
    return None if config.gpu_memory_utilization else int(kv), "\n".join(lines)


def can_split(shape: ModelShape, tp: int) -> bool:
    """Return whether an engine can split the model's heads over `tp` GPUs."""
    queries, keys = shape.num_attention_heads, shape.num_key_value_heads
    return not queries % tp and (not keys % tp or not tp % keys)


def check_tp(shape: ModelShape, tp: int) -> None:
    """Raise ValueError unless an engine can split the model's heads over `tp` GPUs."""
    if not can_split(shape, tp):
        queries, keys = shape.num_attention_heads, shape.num_key_value_heads
        raise ValueError(
            f"--rollout-tp {tp} does not divide {queries} attention heads and {keys} key-value heads evenly; "
            f"use one of {[n for n in range(1, queries + 1) if can_split(shape, n)]}"
        )


def available_bytes(gpu: Gpu) -> int:
    """Return the bytes of a GPU for trainer and engine: all except MARGIN and the memory of other processes."""
    return round(gpu.total_bytes * (1 - MARGIN)) - gpu.used_bytes


def _gpu_line(gpu: Gpu) -> str:
    return (
        f"memory of {gpu.name}: {gpu.total_bytes / GIB:.1f} GiB, {gpu.used_bytes / GIB:.1f} used by others, "
        f"{MARGIN:.0%} kept free"
    )


def listed(items: list[Item]) -> str:
    """Return the sum of items with its parts."""
    return f"{total(items) / GIB:.2f} GiB = " + " + ".join(map(str, items))


def _refusal(lines: list[str], short: float) -> str:
    arithmetic = "; ".join(line.strip() for line in lines)
    return f"the model does not fit, {short / GIB:.1f} GiB are missing: {WAYS_OUT}. {arithmetic}"
