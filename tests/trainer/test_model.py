"""How the model is built: options that trade time for memory, compilation, the value head, and what is refused."""

import functools
import json
import os
import shutil

import dense_varlen  # noqa: F401  gives varlen_attn a kernel for the CPU
import pytest
import torch
from plain_trainer import randomize
from safetensors.torch import load_file, save_file
from tiny_policy import (
    load,
    make_config,
    random_sequences,
    random_tree,
    save_tiny_family,
    save_tiny_model,
)
from transformers import AutoModelForCausalLM

import asyncrl.trainer.model
from asyncrl.config import Config, OptimOptions
from asyncrl.trainer.dealing import distribute
from asyncrl.trainer.model import compiles
from asyncrl.trainer.packing import bundle, pack
from asyncrl.trainer.sampling import Sampling

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture(scope="module", params=["tied", "untied"])
def model(request, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp(request.param))
    return save_tiny_model(folder, tied=request.param == "tied")


def inputs_of(sequences):
    """Arguments of a forward pass."""
    batch = pack(bundle(sequences), "short_rows")
    return batch.input_ids, batch.position_ids, batch.sources, batch.targets, Sampling()


# Memory


def test_offload_keeps_weights_gradients_and_adamw_state_in_host_memory_and_float32(model):
    policy = load(make_config(model, optimizer="adamw", save_memory=("optimizer",)))
    policy.train_step([[bundle(random_sequences(3))]], policy_version=12)
    group = policy.module._get_fsdp_state()._fsdp_param_group
    assert type(group.offload_policy).__name__ == "CPUOffloadPolicy"
    for parameter in policy.module.parameters():
        state = policy.optimizer.state[parameter]
        for tensor in (parameter, state["exp_avg"], state["exp_avg_sq"]):
            assert tensor.device.type == "cpu" and tensor.dtype == torch.float32


# Compilation


def test_compiled_layers_make_the_same_steps_of_micro_batches_of_all_sizes_by_few_graphs(
    tmp_path, monkeypatch
):
    """One sequence, many, none; with gradient and without, with adapters and without, with recomputed layers.

    By dynamo alone, which makes the graphs that inductor would compile; tests/gpu/ has inductor, too. Graphs of one
    layer each would be more than ten. Tolerance, in float32: 1e-4 of every metric.
    """
    monkeypatch.setattr(asyncrl.trainer.model, "choose_attention", lambda *_: "varlen")
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    graphs = torch._dynamo.utils.counters
    graphs.clear()
    path = save_tiny_family("qwen3_moe", str(tmp_path), num_hidden_layers=3)
    options = {"optim": OptimOptions(balance=0.7)}
    options |= {"lora_rank": 2, "kl_coef": 0.1, "save_memory": ("activations",), "minibatches": 2}
    configs = [make_config(path, compile=each, **options) for each in (False, True)]
    policies = list(map(load, configs))
    for policy in policies:
        randomize(policy)
    for num, budget in ((1, 100), (16, 40)):
        updates = [random_sequences(num, seed) for seed in (num, num + 1)]
        share = [[*update, []] for update in distribute(updates, 1, budget)[0]]
        expected, found = (policy.train_step(share, policy_version=12) for policy in policies)
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)
    expected, found = (policy.score([random_sequences(5)])[0] for policy in policies)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert 1 <= graphs["stats"]["unique_graphs"] <= 10, "six of layers, and four of the head"


@pytest.mark.parametrize("share_prefix", ["off", "tree"])
def test_of_numbers_compiled_graphs_take_sizes_of_micro_batches_only(
    tmp_path, monkeypatch, share_prefix
):
    """FlexAttention on a GPU refuses a symbol for a head's size, and the host would convert each float."""
    inputs, graphs = {}, []

    def record(graph, examples):
        graphs.append(graph)
        nodes = [node for node in graph.graph.nodes if node.op == "placeholder"]
        inputs.update((node.name, node.meta["example_value"]) for node in nodes)
        return graph.forward

    monkeypatch.setattr(asyncrl.trainer.model, "choose_attention", lambda *_: "varlen")
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=record))
    torch._dynamo.reset()
    path = save_tiny_family("qwen3", str(tmp_path))
    policy = load(make_config(path, compile=True, temperature=0.8, share_prefix=share_prefix))
    policy.module.attention_of_trees = "flex_attention"
    for num in (2, 60):
        batch = policy._pack(bundle(random_tree(num, num, vocabulary=20), share_prefix), 12)
        for raw in (False, True):
            with torch.no_grad():
                policy._forward(policy.module, batch, raw)
    # of the head with the temperature and without, and of layers for masks of one block and of more
    assert len(graphs) <= 4
    numbers = {name for name, value in inputs.items() if isinstance(value, torch.SymInt)}
    fixed = {name for name in numbers if name.startswith("l_self") or "block_size" in name}
    assert numbers and not fixed
    tensors = {name: value for name, value in inputs.items() if name not in numbers}
    assert all(value.ndim for value in tensors.values()), "a float is a tensor without dimensions"


@pytest.mark.parametrize(
    ("option", "on_cpu", "on_gpu"),
    [(None, False, True), (True, True, True), (False, False, False)],
)
def test_layers_are_compiled_on_gpus_unless_told_otherwise(option, on_cpu, on_gpu):
    config = Config(compile=option)
    found = [compiles(config, torch.device(device)) for device in ("cpu", "cuda")]
    assert found == [on_cpu, on_gpu]


# The value head


def test_a_value_head_begins_at_zero_and_explains_nothing(model):
    policy = load(make_config(model, advantage="gae"))
    assert not policy.module.value_head.weight.full_tensor().any()
    metrics = policy.train_step([[bundle(random_sequences(5))]], policy_version=12)
    assert metrics["value/explained_variance"] == pytest.approx(0.0, abs=1e-12)


def test_the_head_computes_in_float32_above_a_model_in_bfloat16(model):
    policy, seen = load(make_config(model, advantage="gae", dtype="bfloat16")), []
    randomize(policy)
    policy.module.value_head.register_forward_hook(
        lambda _, given, values: seen.append((*given, values))
    )
    policy.score([random_sequences(2)])
    ((hidden, values),) = seen
    assert hidden.dtype == torch.bfloat16 and values.dtype == torch.float32
    assert torch.equal(values, hidden.float() @ policy.module.value_head.weight.full_tensor())


# Models that are refused


def rename_a_weight(folder):
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.down"] = weights.pop("model.layers.1.mlp.down_proj.weight")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def change_the_vocabulary(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 200}))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (rename_a_weight, "its safetensors lack model.layers.1.mlp.down_proj.weight, which its config"),
        (
            change_the_vocabulary,
            r"\S+.weight is \[150, 64\] in its safetensors and \[200, 64\] by its config.json",
        ),
    ],
    ids=["weight", "vocabulary"],
)  # fmt: skip
def test_a_folder_whose_parts_are_not_of_one_model_that_is_trained_is_refused(
    model, tmp_path, spoil, message
):
    folder = shutil.copytree(model, tmp_path / "model")
    spoil(folder)
    with pytest.raises(ValueError, match=f"--model {os.fspath(folder)}: {message}"):
        load(make_config(str(folder)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_have_the_names_and_values_of_the_saved_model_each_once(model, tmp_path, dtype):
    folder = str(shutil.copytree(model, tmp_path / "model"))
    AutoModelForCausalLM.from_pretrained(folder).to(dtype).save_pretrained(folder)
    policy = load(make_config(folder))
    policy.score([random_sequences(2)])  # a forward pass must not leave gathered weights behind
    published = list(policy.named_full_parameters())
    saved = load_file(os.path.join(folder, "model.safetensors"))
    assert sorted(name for name, _ in published) == sorted(saved)
    for name, tensor in published:
        assert tensor.dtype == torch.float32 and torch.equal(tensor, saved[name].float())
