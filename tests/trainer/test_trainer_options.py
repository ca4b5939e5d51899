"""Options that trade time for memory, and must leave the update alone: checkpointing, compilation, offload, chunks."""

import functools
import os
import shutil
from dataclasses import dataclass, field

import dense_varlen  # noqa: F401  gives varlen_attn a kernel for the CPU
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from tiny_policy import (
    assert_same_gradient,
    first_gradient,
    grouped_sequences,
    load,
    random_sequences,
    save_tiny_model,
    train_on_two_ranks,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

import asyncrl.trainer.model
from algos.sampling import Sampling
from asyncrl.config import Config, OptimOptions
from asyncrl.trainer.batch import distribute
from asyncrl.trainer.logprobs import TokenLogprobs
from asyncrl.trainer.model import compiles, shard
from asyncrl.trainer.packing import bundle, pack

CHUNK_ROWS = 7
OPTIONS = {
    "plain": {},
    "checkpointing": {"save_memory": ("activations",)},
    "offload": {"save_memory": ("optimizer",)},
    "both": {"save_memory": ("activations", "optimizer")},
    "share_prefix": {"share_prefix": "prompt"},
    "share_prefix_tree_checkpointing": {"share_prefix": "tree", "save_memory": ("activations",)},
}


pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture(scope="module")
def five_layers(tmp_path_factory):
    path = save_tiny_model(str(tmp_path_factory.mktemp("five_layers")))
    config = Qwen3Config.from_pretrained(
        path, num_hidden_layers=5, layer_types=["full_attention"] * 5
    )
    Qwen3ForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module", params=["tied", "untied"])
def model(request, tmp_path_factory):
    return save_tiny_model(
        str(tmp_path_factory.mktemp(request.param)), tied=request.param == "tied"
    )


def make_config(model, **options):
    """No clipping that would hide a wrong gradient."""
    return Config(
        **{
            "model": model,
            "algo": "tis",
            "algo_args": ("clip_high=10",),
            "max_grad_norm": 1e9,
            "kl_coef": 0.1,
            **options,
        }
    )


def trace(config, steps=4, budget=60):
    """Metrics of some steps, and the weights after them."""
    policy = load(config)
    metrics = []
    for step in range(steps):
        updates = [random_sequences(12, seed=step + 10 * i) for i in range(config.minibatches)]
        metrics.append(
            policy.train_step(distribute(updates, 1, budget)[0], policy_version=12 + step)
        )
    return metrics, {name: tensor.clone() for name, tensor in policy.named_full_parameters()}


@pytest.fixture(scope="module")
def plain_trace(model, one_rank):
    """What `trace` finds without an option."""
    return trace(make_config(model, minibatches=2))


@pytest.mark.parametrize("name", ["checkpointing", "offload", "both"])
def test_checkpointing_and_offload_change_no_bit_of_the_loss_trace_nor_of_the_weights(
    model, plain_trace, name
):
    metrics, weights = plain_trace
    others, other_weights = trace(make_config(model, minibatches=2, **OPTIONS[name]))
    assert others == metrics and metrics[0]["loss"] != metrics[-1]["loss"]
    for parameter, tensor in weights.items():
        assert torch.equal(other_weights[parameter], tensor), parameter


def test_checkpointing_runs_every_layer_a_second_time(model):
    counts = []
    for save_memory in ((), ("activations",)):
        policy = load(make_config(model, save_memory=save_memory, kl_coef=0.0))
        calls = []
        for layer in policy.module.model.model.layers:
            layer.mlp.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        policy.train_step([[bundle(random_sequences(3))]], policy_version=12)
        counts.append(len(calls))
    assert counts == [2, 4]


def test_offload_keeps_weights_gradients_and_adamw_state_in_host_memory_and_float32(model):
    policy = load(make_config(model, save_memory=("optimizer",)))
    policy.train_step([[bundle(random_sequences(3))]], policy_version=12)
    assert (
        policy.module._get_fsdp_state()._fsdp_param_group.offload_policy.__class__.__name__
        == "CPUOffloadPolicy"
    )
    for parameter in policy.module.parameters():
        state = policy.optimizer.state[parameter]
        for tensor in (parameter, state["exp_avg"], state["exp_avg_sq"]):
            assert tensor.device.type == "cpu" and tensor.dtype == torch.float32


def test_the_embedding_is_gathered_by_itself_unless_it_is_the_head_which_stays_whole_for_the_backward_pass(
    model,
):
    policy = load(make_config(model, kl_coef=0.0))
    inner, groups = policy.module.model, {}
    for name, part in policy.module.named_modules():
        if isinstance(part, FSDPModule):
            owners = [
                of._module_info.module
                for of in part._get_fsdp_state()._fsdp_param_group.fsdp_params
            ]
            groups[name] = {type(owner).__name__.removeprefix("FSDP") for owner in owners}
    is_tied = inner.config.tie_word_embeddings
    assert groups.pop("") == {"Qwen3RMSNorm", "Embedding" if is_tied else "Linear"}
    assert groups.pop("model.model.embed_tokens", None) == (None if is_tied else {"Embedding"})
    assert list(groups) == ["model.model.layers.0", "model.model.layers.1"]
    batch = pack(bundle(random_sequences(3)), one_row=False)
    loss, sizes = (
        policy.module(
            batch.input_ids, batch.position_ids, batch.sources, batch.targets, Sampling()
        )[0],
        [],
    )
    inner.lm_head.register_forward_pre_hook(
        lambda head, _: sizes.append(isinstance(head.weight, DTensor))
    )
    loss.sum().backward()  # computes the head again
    assert sizes == [False]
    assert isinstance(inner.lm_head.weight, DTensor) and isinstance(
        inner.model.embed_tokens.weight, DTensor
    )


@pytest.fixture(scope="module")
def two_ranks(model, tmp_path_factory):
    """What two real gloo ranks found with a head in chunks of 7 rows, for each of OPTIONS."""
    folder = str(tmp_path_factory.mktemp("two_ranks"))
    cases = {name: (make_config(model, **options), CHUNK_ROWS) for name, options in OPTIONS.items()}
    assert run_ranks(train_on_two_ranks, 2, folder, cases) == [0, 0]
    return torch.load(os.path.join(folder, "found.pt"))


@pytest.mark.parametrize("name", OPTIONS)
def test_two_sharded_ranks_with_the_head_in_chunks_give_the_gradient_of_one_at_once(
    two_ranks, model, name
):
    metrics, gradient = two_ranks[name]
    policy = load(make_config(model))
    expected = policy.train_step(
        distribute([grouped_sequences(5, 3)], 1, 100_000)[0], policy_version=12
    )
    assert (metrics.pop("tokens/saved_share") > 0.1) == ("share_prefix" in name)
    assert (metrics.pop("tokens/forward") < expected.pop("tokens/forward")) == (
        "share_prefix" in name
    )
    expected.pop("tokens/saved_share")
    assert metrics == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert_same_gradient(gradient, first_gradient(policy))


class Summed(TorchDispatchMode):
    """Counts the gradients that are summed over replicas: all-reduces of more than a few sums of metrics."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += "allreduce" in str(function) and args[0][0].numel() > 1000
        return function(*args, **(kwargs or {}))


def train_two_replicas(rank, folder, config):
    """Body of a spawned rank: one update in several micro-batches; rank 0 writes `found.pt`."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2
    )
    policy = load(config)
    share = distribute([random_sequences(16)], 2, 50)[rank]
    with Summed() as summed:
        policy.train_step(share, policy_version=12)
    gradient = first_gradient(policy)
    if rank == 0:
        torch.save((len(share[0]), summed.count, gradient), f"{folder}/found.pt")
    dist.destroy_process_group()


def test_replicas_sum_their_gradients_once_for_all_micro_batches(model, tmp_path):
    assert run_ranks(
        train_two_replicas, 2, str(tmp_path), make_config(model, kl_coef=0.0, replicas=2)
    ) == [0, 0]
    num_microbatches, num_sums, gradient = torch.load(tmp_path / "found.pt")
    policy = load(make_config(model, kl_coef=0.0))
    policy.train_step(distribute([random_sequences(16)], 1, 100_000)[0], policy_version=12)
    num_groups = sum(isinstance(part, FSDPModule) for part in policy.module.modules())
    assert num_microbatches > 2 and num_sums == num_groups
    assert_same_gradient(gradient, first_gradient(policy))


def test_adamw_is_one_kernel_for_all_weights_and_the_update_of_its_definition(model):
    """Of the first step: the gradient's sign times lr, but for eps, and the decay of the weight itself."""
    policy = load(
        make_config(
            model, kl_coef=0.0, lr=1e-2, optim=OptimOptions(warmup=0, args=("weight_decay=0.1",))
        )
    )
    before, kernels = {name: p.clone() for name, p in policy.named_full_parameters()}, Kernels()
    with kernels:
        policy.train_step([[bundle(random_sequences(3))]], policy_version=12)
    assert kernels.names.count("_fused_adamw_") == 1
    gradient = first_gradient(policy)
    for name, parameter in policy.named_full_parameters():
        grad = gradient[f"{name}"]
        expected = before[name] * (1 - 1e-2 * 0.1) - 1e-2 * grad / (grad.abs() + 1e-8)
        torch.testing.assert_close(parameter, expected, rtol=1e-4, atol=1e-6)


@dataclass
class Kernels(TorchDispatchMode):
    """Names of the operations on plain tensors."""

    names: list[str] = field(default_factory=list)

    def __post_init__(self):
        super().__init__()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented
        self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


# Compilation


INDUCTOR = pytest.param(
    4,
    "varlen",
    "inductor",
    marks=[
        pytest.mark.slow,
        pytest.mark.skipif(
            shutil.which("g++") is None, reason="inductor needs a C++ compiler, g++ is missing"
        ),
        pytest.mark.timeout(900),  # a compilation takes a minute on a busy core
    ],
)


@pytest.mark.parametrize(
    ("lora_rank", "attention", "backend"),
    [(0, "sdpa", "eager"), (4, "varlen", "eager"), INDUCTOR],
)
def test_compiled_layers_give_the_same_loss_trace_and_share_their_graphs(
    five_layers, lora_rank, attention, backend, monkeypatch
):
    """Tolerance, in float32: 1e-4 of every metric. The layers are recomputed too, as both options meet in a layer.

    Both backends run the graphs that dynamo makes; inductor, which a run has, makes C++ of them and compiles that.
    """
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    monkeypatch.setattr(asyncrl.trainer.model, "choose_attention", lambda *_: attention)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    options = {"save_memory": ("activations",), "kl_coef": 0.0, "lora_rank": lora_rank}
    metrics, weights = trace(make_config(five_layers, **options), steps=3, budget=1000)
    compiled, compiled_weights = trace(
        make_config(five_layers, **options, compile=True), steps=3, budget=1000
    )
    for mine, expected in zip(compiled, metrics, strict=True):
        assert mine == pytest.approx(expected, rel=1e-4, abs=1e-5)
    for name, tensor in weights.items():
        torch.testing.assert_close(compiled_weights[name], tensor, rtol=1e-3, atol=1e-4)
    # for five layers, of which each ran
    assert 1 <= torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({}, 2),
        pytest.param({"save_memory": ("activations",)}, 4, marks=pytest.mark.study),
        pytest.param({"lora_rank": 2, "kl_coef": 0.1}, 4, marks=pytest.mark.study),
        ({"lora_rank": 2, "kl_coef": 0.1, "save_memory": ("activations",)}, 6),
    ],
)
def test_on_a_gpu_micro_batches_of_all_sizes_are_of_few_kinds(
    five_layers, options, most, monkeypatch
):
    """One sequence, many, none; with gradient and without: below the eight past which torch compiles no more."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    monkeypatch.setattr(asyncrl.trainer.model, "choose_attention", lambda *_: "varlen")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    policy = load(
        make_config(five_layers, **{"kl_coef": 0.0, "minibatches": 2, "compile": True} | options)
    )
    for num, budget in ((8, 10_000), (1, 100), (2, 100), (16, 40)):
        updates = [random_sequences(num, seed) for seed in (num, num + 1)]
        policy.train_step(distribute(updates, 1, budget)[0], policy_version=12)
    policy.train_step([[[], bundle(random_sequences(3))]], policy_version=12)
    policy.score([random_sequences(5)])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= most
    assert not torch._dynamo.utils.counters["graph_break"]


def test_layers_are_compiled_on_gpus_unless_told_otherwise():
    found = {(asked, on): compiles(Config(compile=asked), torch.device(on)) for asked in (None, True, False)
             for on in ("cpu", "cuda")}  # fmt: skip
    assert [key for key, is_compiled in found.items() if is_compiled] == [
        (None, "cuda"),
        (True, "cpu"),
        (True, "cuda"),
    ]


# Precision


def test_bfloat16_compute_leaves_weights_gradients_and_logprobs_in_float32(model):
    """What a GPU rank does, on the CPU."""
    inner = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    module, seen = TokenLogprobs(inner, CHUNK_ROWS), []
    shard(
        [*inner.model.layers, module], init_device_mesh("cpu", (1,)), torch.bfloat16, offload=False
    )
    for part in (inner.model.layers[0].mlp.up_proj, inner.lm_head):
        part.register_forward_hook(
            lambda part, _, output: seen.append((part.weight.dtype, output.dtype))
        )
    batch = pack(bundle(random_sequences(12)), one_row=False)
    logprobs, entropy, _ = module(
        batch.input_ids, batch.position_ids, batch.sources, batch.targets, Sampling()
    )
    logprobs.sum().backward()
    assert set(seen) == {(torch.bfloat16, torch.bfloat16)} and len(seen) > 20
    assert logprobs.dtype == entropy.dtype == torch.float32
    for parameter in module.parameters():
        assert (
            isinstance(parameter, DTensor)
            and parameter.dtype == parameter.grad.dtype == torch.float32
        )
