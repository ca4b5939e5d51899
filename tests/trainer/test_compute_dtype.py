"""--dtype bfloat16 on the CPU: what is computed in it is close to float32, and what is trained stays float32."""

import pytest
import torch
from ranks import run_ranks
from tiny_policy import first_gradient, grouped_sequences, load, random_sequences, save_tiny_model, train_on_two_ranks

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
