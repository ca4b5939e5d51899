"""--dtype bfloat16 on the CPU: what is computed in it is close to float32, and what is trained stays float32."""

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from tiny_policy import first_gradient, grouped_sequences, load, random_sequences, save_tiny_model, train_on_two_ranks
from torch.utils._python_dispatch import TorchDispatchMode

from cluster.placement import place
from config import Config
from trainer.batch import distribute

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_model(str(tmp_path_factory.mktemp("model")))


def make_config(model, **options):
    clip = {"algo": "tis", "algo_args": ("clip_high=10",), "max_grad_norm": 1e9}
    return Config(model=model, **clip, **options)


def close(actual, expected) -> bool:
    """Whether gradients point the same way, within what 8 bits of a mantissa leave of 2 layers."""
    pairs = [(actual[name].flatten(), expected[name].flatten()) for name in expected]
    a, b = (torch.cat(parts).double() for parts in zip(*pairs, strict=True))
    return bool((a - b).norm() < 0.05 * b.norm())


@pytest.mark.parametrize("options", [{}, {"share_prefix": True, "save_memory": ("activations",)}, {"lora_rank": 4}])
def test_bfloat16_computes_about_what_float32_does_and_not_the_same(model, options):
    sequences = grouped_sequences(5, 3)
    found = {}
    for dtype in ("float32", "bfloat16"):
        policy = load(make_config(model, dtype=dtype, **options))
        scores = policy.score([sequences])[0]
        share = distribute([sequences], 1, 10_000, policy.config.share_prefix)[0]
        metrics = policy.train_step(share, policy_version=12)
        found[dtype] = (scores, metrics, first_gradient(policy))
    (exact, _, gradient), (rounded, metrics, rounded_gradient) = found["float32"], found["bfloat16"]
    assert exact.dtype == rounded.dtype == torch.float32
    assert 1e-4 < (exact - rounded).abs().mean() < 0.05
    assert close(rounded_gradient, gradient) and metrics["grad_norm"] > 0


def test_what_is_trained_and_kept_stays_float32_and_what_is_sent_is_bfloat16(model):
    policy = load(make_config(model, dtype="bfloat16", lr=1e-6, warmup=0))
    before = {name: tensor.clone() for name, tensor in policy.named_full_parameters()}
    policy.train_step(distribute([random_sequences(8)], 1, 10_000)[0], policy_version=12)
    after = dict(policy.named_full_parameters())
    assert {tensor.dtype for tensor in after.values()} == {torch.float32}
    moments = [value for state in policy.optimizer.state.values() for name, value in state.items() if "exp" in name]
    assert {moment.dtype for moment in moments} == {torch.float32}
    assert {spec.dtype for spec in policy.sent_specs()} == {torch.bfloat16}
    name = "model.layers.0.mlp.up_proj.weight"  # 1e-6 is below what bfloat16 could add to most of it
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


def test_weights_are_cast_to_what_is_sent_before_they_are_gathered_and_merged_in_float32(model, tmp_path):
    options = {"plain": {}, "offloaded": {"save_memory": ("optimizer",)}, "adapters": {"lora_rank": 4, "lr": 0.1}}
    configs = {name: make_config(model, dtype="bfloat16", warmup=0, **chosen) for name, chosen in options.items()}
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
