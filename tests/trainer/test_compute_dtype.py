"""--dtype bfloat16 on the CPU: what is computed in it is close to float32, and what is trained stays float32."""

import shutil

import dense_varlen  # noqa: F401  gives varlen_attn a kernel for the CPU
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from tiny_policy import (
    VOCAB,
    first_gradient,
    grouped_sequences,
    load,
    random_sequences,
    save_tiny_model,
    train_on_two_ranks,
)
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig

import asyncrl.trainer.model
from algos import LOSSES
from asyncrl.cluster.placement import place
from asyncrl.config import Config, OptimOptions
from asyncrl.trainer.batch import distribute
from asyncrl.trainer.model import _read_model

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_model(str(tmp_path_factory.mktemp("model")))


def make_config(model, **options):
    clip = {
        "algo": "tis",
        "algo_args": () if "algo" in options else ("clip_high=10",),
        "max_grad_norm": 1e9,
    }
    return Config(**{"model": model, **clip, **options})


def gradient_of(policy):
    """Full gradient by parameter name, before the optimizer has it."""
    named = policy.module.model.named_parameters()
    return {name: p.grad.full_tensor().clone() for name, p in named if p.requires_grad}


def close(actual, expected) -> bool:
    """Whether gradients point the same way, within what 8 bits of a mantissa leave of 2 layers."""
    pairs = [(actual[name].flatten(), expected[name].flatten()) for name in expected]
    a, b = (torch.cat(parts).double() for parts in zip(*pairs, strict=True))
    return bool((a - b).norm() < 0.05 * b.norm())


OPTIONS = {
    "plain": {},
    "shared prefixes, recomputed": {"share_prefix": "tree", "save_memory": ("activations",)},
    "adapters": {"lora_rank": 4},
    "adapters and KL": {"lora_rank": 4, "kl_coef": 0.1},
    "KL": {"kl_coef": 0.1},
    "offloaded": {"save_memory": ("optimizer",)},
    "both saved": {"save_memory": ("activations", "optimizer")},
    "two updates": {"minibatches": 2},
    "two updates, interpolated": {
        "minibatches": 2,
        "proximal": "loglinear",
        "algo": "decoupled_ppo",
    },
    "cold": {"temperature": 0.7},
    "every loss aggregated by sequence": {"loss_aggregation": "sequence_mean"},
    **{algo: {"algo": algo, "algo_args": ()} for algo in LOSSES},
    # A token that rounding puts beyond the clip would change the gradient of its whole sequence.
    "gmpo": {"algo": "gmpo", "algo_args": ("clip_low=9", "clip_high=9")},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("attention", ["sdpa", "varlen"])
def test_bfloat16_computes_about_what_float32_does_and_not_the_same(
    model, name, attention, monkeypatch
):
    """As a GPU computes; tolerance 5 % of the gradient, and 0.05 nats of the mean log-prob."""
    options, sequences = OPTIONS[name], grouped_sequences(6, 4)
    monkeypatch.setattr(
        asyncrl.trainer.model,
        "choose_attention",
        lambda *_: "sdpa" if "share_prefix" in options else attention,
    )
    found = {}
    for dtype in ("float32", "bfloat16"):
        policy = load(make_config(model, dtype=dtype, **options))
        scores = policy.score([sequences])[0]
        updates = [
            sequences[i :: policy.config.minibatches] for i in range(policy.config.minibatches)
        ]
        share = distribute(updates, 1, 200, policy.config.share_prefix, policy.module.cost)[0]
        gradients = []
        policy.optimizer.register_step_pre_hook(
            lambda *_, policy=policy, of=gradients: of.append(gradient_of(policy))
        )
        metrics = policy.train_step(share, policy_version=12)
        found[dtype] = (scores, metrics, gradients[0])
    (exact, _, gradient), (rounded, metrics, rounded_gradient) = found["float32"], found["bfloat16"]
    assert exact.dtype == rounded.dtype == torch.float32
    assert 1e-4 < (exact - rounded).abs().mean() < 0.05
    assert close(rounded_gradient, gradient) and metrics["grad_norm"] > 0


def test_what_is_trained_and_kept_stays_float32_and_what_is_sent_is_bfloat16(model):
    policy = load(make_config(model, dtype="bfloat16", lr=1e-6, optim=OptimOptions(warmup=0)))
    before = {name: tensor.clone() for name, tensor in policy.named_full_parameters()}
    policy.train_step(distribute([random_sequences(8)], 1, 10_000)[0], policy_version=12)
    after = dict(policy.named_full_parameters())
    assert {tensor.dtype for tensor in after.values()} == {torch.float32}
    moments = [
        value
        for state in policy.optimizer.state.values()
        for name, value in state.items()
        if "exp" in name
    ]
    assert {moment.dtype for moment in moments} == {torch.float32}
    assert {spec.dtype for spec in policy.sent_specs()} == {torch.bfloat16}
    # 1e-6 is below what bfloat16 could add to most of it
    name = "model.layers.0.mlp.up_proj.weight"
    assert (after[name] != before[name]).float().mean() > 0.9
    assert (after[name].bfloat16() != before[name].bfloat16()).float().mean() < 0.1


class Gathered(TorchDispatchMode):
    """Counts what is gathered from each rank, bytes."""

    num_bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "all_gather" in str(function):
            self.num_bytes += args[0].nbytes
        return function(*args, **(kwargs or {}))


def gather_on_two_ranks(rank, folder, configs):
    """Body of a spawned rank: gather the weights of each config as they are sent and as they are."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    found = {}
    for name, config in configs.items():
        policy = load(config)
        policy.train_step(distribute([random_sequences(8)], 2, 10_000)[rank], policy_version=12)
        with Gathered() as gathered:
            sent = {name: tensor.clone() for name, tensor in policy.sent_parameters()}
        found[name] = sent, dict(policy.named_full_parameters()), gathered.num_bytes
    if rank == 0:
        torch.save(found, f"{folder}/found.pt")
    dist.destroy_process_group()


def test_weights_are_cast_to_what_is_sent_before_they_are_gathered_and_merged_in_float32(
    model, tmp_path
):
    options = {
        "plain": {},
        "offloaded": {"save_memory": ("optimizer",)},
        "adapters": {"lora_rank": 4, "lr": 0.1},
    }
    fixed = {"dtype": "bfloat16", "optim": OptimOptions(warmup=0)}
    configs = {name: make_config(model, **fixed, **chosen) for name, chosen in options.items()}
    assert run_ranks(gather_on_two_ranks, 2, str(tmp_path), configs) == [0, 0]
    found = torch.load(tmp_path / "found.pt")
    for sent, full, _ in found.values():
        assert {tensor.dtype for tensor in sent.values()} == {torch.bfloat16}
        assert all(tensor.dtype == torch.float32 for tensor in full.values())
        assert all(torch.equal(sent[name], full[name].bfloat16()) for name in full)
    per_rank = sum(tensor.numel() for tensor in found["plain"][0].values()) / 2
    assert found["plain"][2] == found["offloaded"][2] == 2 * per_rank
    merged, plain = found["adapters"][1], found["plain"][1]
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(merged[name], merged[name].bfloat16().float()), "merged in float32"
    assert merged.keys() == plain.keys() and found["adapters"][2] > 2 * per_rank


def test_a_reference_is_kept_in_what_it_computes_in(model):
    """And computes what float32 weights do, which are rounded to it before each use."""
    sequences, found = [random_sequences(8)], {}
    for dtype in ("float32", "bfloat16"):
        policy = load(make_config(model, dtype=dtype, kl_coef=0.1))
        found[dtype] = {parameter.dtype for parameter in policy.reference.parameters()}
    assert found == {"float32": {torch.float32}, "bfloat16": {torch.bfloat16}}
    scores = policy.score(sequences)[0]
    policy.module = policy.reference
    assert torch.equal(policy.score(sequences)[0], scores)


def test_two_ranks_in_bfloat16_find_the_gradient_of_one(model, tmp_path):
    config = make_config(model, dtype="bfloat16")
    assert run_ranks(train_on_two_ranks, 2, str(tmp_path), {"bfloat16": (config, 1024)}) == [0, 0]
    _, gradient = torch.load(tmp_path / "found.pt")["bfloat16"]
    policy = load(config)
    policy.train_step(distribute([grouped_sequences(5, 3)], 1, 10_000)[0], policy_version=12)
    assert close(gradient, first_gradient(policy))


def test_auto_is_float32_on_the_cpu_and_bfloat16_on_a_gpu_which_takes_nothing_else():
    dtypes = {dtype: (Config(dtype=dtype).dtype_on("cpu"), Config(dtype=dtype).dtype_on("cuda"))
              for dtype in ("auto", "bfloat16")}  # fmt: skip
    assert dtypes == {"auto": ("float32", "bfloat16"), "bfloat16": ("bfloat16", "bfloat16")}
    assert Config(dtype="float32").dtype_on("cpu") == "float32"
    place(Config(dtype="float32"), 0, 2, 1)
    with pytest.raises(ValueError, match="--dtype float32 is for the CPU, and 2 GPUs are visible"):
        place(Config(dtype="float32"), 2, 8, 1)


# Reading


def gemma_in_bfloat16(path):
    """Its embedding's scale is a buffer, √40, which bfloat16 rounds."""
    sizes = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
        "head_dim": 8,
    }
    config = Gemma3TextConfig(
        vocab_size=VOCAB, hidden_size=40, intermediate_size=48, pad_token_id=0, **sizes
    )
    Gemma3ForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    return str(path)


def test_a_model_that_is_stored_in_bfloat16_is_read_in_it_and_widened_shard_by_shard(
    model, tmp_path
):
    folder = str(shutil.copytree(model, tmp_path / "model"))
    AutoModelForCausalLM.from_pretrained(folder).to(torch.bfloat16).save_pretrained(folder)
    read = _read_model(folder, torch.float32)
    assert {parameter.dtype for parameter in read.parameters()} == {torch.bfloat16}
    assert {buffer.dtype for buffer in read.buffers()} == {torch.float32}
    expected = dict(
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).named_parameters()
    )
    for name, tensor in load(make_config(folder)).named_full_parameters():
        assert tensor.dtype == torch.float32 and torch.equal(tensor, expected[name])
    assert {parameter.dtype for parameter in _read_model(model, torch.float32).parameters()} == {
        torch.float32
    }


def test_a_buffer_that_bfloat16_would_round_is_not_rounded(tmp_path):
    path = gemma_in_bfloat16(tmp_path)
    assert _read_model(path, torch.float32).model.embed_tokens.embed_scale.item() == pytest.approx(
        40**0.5, abs=1e-6
    )
    policy = load(make_config(path))
    assert policy.module.model.model.embed_tokens.embed_scale.item() == pytest.approx(
        40**0.5, abs=1e-6
    )
