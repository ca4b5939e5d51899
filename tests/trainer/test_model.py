"""How the model is built: what it is compiled to, in which dtype it computes, the value head, and what is refused."""

import functools
import shutil

import dense_varlen  # noqa: F401  gives varlen_attn a kernel for the CPU
import pytest
import torch
from plain_trainer import PlainTrainer, check_step, make_step, randomize, relative_error
from safetensors.torch import load_file
from tiny_families import tiny_config
from tiny_policy import (
    VERSION,
    change_sharing,
    grouped_sequences,
    load,
    make_config,
    random_sequences,
    random_tree,
    save_tiny_family,
    weights_of,
)
from transformers import AutoConfig, AutoModelForCausalLM

import asyncrl.trainer.model
from asyncrl.config import Config, OptimOptions
from asyncrl.job.inputs import check_model
from asyncrl.trainer.checkpoint_writer import training_state
from asyncrl.trainer.lora import add_adapters, named_adapters
from asyncrl.trainer.model import _read_model, compiles, load_model
from asyncrl.trainer.sharding import gather, trainer_mesh
from extras.trees.tree import bundle

pytestmark = pytest.mark.usefixtures("one_rank")
BALANCE = OptimOptions(seq_aux_loss_coef=0.7)


@pytest.fixture
def by_bounds(monkeypatch):
    """Attention as on a GPU."""
    monkeypatch.setattr(asyncrl.trainer.model, "choose_attention", lambda *_: "varlen")


def test_offload_keeps_weights_in_host_memory(model):
    module = load(make_config(model, save_memory=("optimizer",))).module
    group = module._get_fsdp_state()._fsdp_param_group
    assert type(group.offload_policy).__name__ == "CPUOffloadPolicy"


def test_offloaded_weights_are_filled_beside_their_buffers_which_then_move(model, monkeypatch):
    fill = asyncrl.trainer.model._fill_from_rank_0

    def check_and_fill(empty, *arguments):
        tensors = [*empty.parameters(), *empty.buffers()]
        assert {tensor.device.type for tensor in tensors} == {"cpu"}
        fill(empty, *arguments)

    monkeypatch.setattr(asyncrl.trainer.model, "_fill_from_rank_0", check_and_fill)
    config = make_config(model, save_memory=("optimizer",))
    mesh = trainer_mesh(1, torch.device("cpu"))
    filled = load_model(config, model, mesh, torch.device("meta")).model
    assert {buffer.device.type for buffer in filled.buffers()} == {"meta"}


# Compilation


@pytest.fixture
def graphs(monkeypatch, by_bounds):
    """The graphs that dynamo makes, each with its inputs by name; inductor would compile them, as in tests/gpu/."""
    graphs = []

    def record(graph, examples):
        nodes = [node for node in graph.graph.nodes if node.op == "placeholder"]
        graphs.append({node.name: node.meta["example_value"] for node in nodes})
        return graph.forward

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=record))
    torch._dynamo.reset()
    return graphs


def check_inputs(graphs):
    """FlexAttention on a GPU refuses a symbol for a head's size, and the host would convert each float."""
    inputs = {name: value for graph in graphs for name, value in graph.items()}
    numbers = {name for name, value in inputs.items() if isinstance(value, torch.SymInt)}
    fixed = {name for name in numbers if name.startswith("l_self") or "block_size" in name}
    assert numbers and not fixed
    assert any("q_proj" in name for name in inputs), "layers are compiled"
    tensors = [value for name, value in inputs.items() if name not in numbers]
    assert all(value.ndim for value in tensors), "a float is a tensor without dimensions"


@pytest.mark.parametrize(
    ("options", "most_graphs"),
    [
        ({"temperature": 0.8}, 4),
        pytest.param(
            {"lora_rank": 2, "kl_coef": 0.1, "save_memory": ("activations",), "minibatches": 2},
            10,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_compiled_layers_make_the_step_of_the_definition_by_few_graphs(
    tmp_path, graphs, options, most_graphs
):
    """Micro-batches have one sequence, many, or none. Graphs of one layer each would be more."""
    path = save_tiny_family("qwen3_moe", str(tmp_path), num_hidden_layers=3)
    policy = load(make_config(path, compile=True, optim=BALANCE, **options))
    randomize(policy)
    updates = [random_sequences(9), random_sequences(9, seed=1)][: policy.config.minibatches]
    check_step(policy, updates, 40, relative=1e-4)
    assert 1 <= len(graphs) <= most_graphs, "of layers and of the head"
    check_inputs(graphs)


def test_layers_are_compiled_for_trees_of_all_sizes(untied, graphs):
    policy = load(make_config(untied, compile=True, temperature=0.8, share_prefix="tree"))
    change_sharing(policy, attention_of_trees="flex_attention")
    for num in (2, 60):
        batch = policy.pack_to_train(bundle(random_tree(num, num, vocabulary=20), "tree"), 12)
        for raw in (False, True):
            with torch.no_grad():
                policy.forward(policy.module, batch, raw)
    # of the head with the temperature and without, and of layers for masks of one block and of more
    assert len(graphs) <= 4
    check_inputs(graphs)


def test_layers_are_compiled_and_compute_in_16_bits_on_gpus_unless_told_otherwise():
    """tests/cluster/cases.toml has float32, which a GPU does not take."""
    found = []
    for options in ({}, {"compile": True, "dtype": "float16"}, {"compile": False}):
        for device in ("cpu", "cuda"):
            config = Config(**options)
            found.append((compiles(config, torch.device(device)), config.dtype_on(device)))
    assert found == [
        (False, "float32"),
        (True, "bfloat16"),
        (True, "float16"),
        (True, "float16"),
        (False, "float32"),
        (False, "bfloat16"),
    ]


# What is computed in bfloat16


@pytest.mark.parametrize(
    "options",
    [
        {"share_prefix": "tree", "save_memory": ("activations",), "advantage": "gae"},
        pytest.param(
            {"lora_rank": 4, "kl_coef": 0.1, "save_memory": ("activations", "optimizer")},
            marks=pytest.mark.slow,
        ),
        {"temperature": 0.7, "algo": "gspo", "loss_aggregation": "sequence_mean"},
    ],
)
def test_bfloat16_computes_about_what_float32_does_and_not_the_same(model, by_bounds, options):
    """As a GPU computes, by chunks of the head; tolerance 5 % of the gradient, and 0.05 nats of the mean log-prob."""
    config = make_config(model, dtype="bfloat16", **options)
    policy = load(config)
    change_sharing(policy, attention_of_trees="sdpa")
    randomize(policy)
    policy.module.chunk_rows = 7
    plain, sequences = PlainTrainer(policy), grouped_sequences(6, 4)
    scores, exact = policy.logprobs_of([sequences])[0], plain.read(sequences)[0]
    assert scores.dtype == torch.float32
    assert 1e-4 < (scores - exact).abs().mean() < 0.05
    metrics, (gradient,) = make_step(policy, [sequences], 200)
    expected_metrics, (expected,) = plain.train_step([sequences])
    name = "loss/grad_norm"
    assert metrics[name] == pytest.approx(expected_metrics[name], rel=0.05)
    # 8 bits of a mantissa leave this of 2 layers
    assert relative_error(gradient, expected) < 0.05


def dtypes_of(module):
    return {parameter.dtype for parameter in module.parameters()}


def test_what_is_trained_and_kept_stays_float32(model):
    optim = OptimOptions(warmup_steps=0)
    config = make_config(model, dtype="bfloat16", optimizer="adamw", lr=1e-6, optim=optim)
    policy = load(config)
    before = weights_of(policy)["model.layers.0.mlp.up_proj.weight"]
    policy.train_step([[random_sequences(8)]], VERSION)
    after = weights_of(policy)["model.layers.0.mlp.up_proj.weight"]
    state = training_state(policy)
    assert {state[name].dtype for name in state if "exp_avg" in name} == {torch.float32}
    # 1e-6 is below what bfloat16 could add to most of it
    assert (after != before).float().mean() > 0.9
    assert (after.bfloat16() != before.bfloat16()).float().mean() < 0.1


def test_what_is_frozen_is_kept_in_the_dtype_of_computing_and_what_is_added_to_it_in_float32(model):
    """A reference computes what float32 weights do, which are rounded to it before each use."""
    policy = load(make_config(model, dtype="bfloat16", kl_coef=0.1, advantage="gae"))
    sequences, seen, head = [random_sequences(8)], [], policy.module.value_head
    assert not gather(head.weight).any(), "it begins at zero"
    randomize(policy)
    head.register_forward_hook(lambda _, given, values: seen.append((*given, values)))
    scores = policy.logprobs_of(sequences)[0]
    ((hidden, values),) = seen
    assert hidden.dtype == torch.bfloat16 and values.dtype == torch.float32
    assert torch.equal(values, hidden.float() @ gather(head.weight))
    policy = load(make_config(model, dtype="bfloat16", kl_coef=0.1))
    policy.module = policy.reference
    assert dtypes_of(policy.reference) == {torch.bfloat16}
    assert torch.equal(policy.logprobs_of(sequences)[0], scores)
    adapted = load(make_config(model, dtype="bfloat16", lora_rank=2))
    for name, parameter in adapted.module.named_parameters():
        is_adapter = name.endswith(("lora_A", "lora_B"))
        assert parameter.dtype == (torch.float32 if is_adapter else torch.bfloat16)


# Reading


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_have_the_names_and_values_of_the_saved_model(untied, tmp_path, dtype):
    """Weights are read in their stored dtype. test_checkpoint_writer.py has a model whose head is tied."""
    AutoModelForCausalLM.from_pretrained(untied).to(dtype).save_pretrained(tmp_path)
    read = _read_model(str(tmp_path), torch.float32)
    assert dtypes_of(read) == {dtype} and read.model.rotary_emb.inv_freq.dtype == torch.float32
    policy = load(make_config(str(tmp_path)))
    # A forward pass must not leave gathered weights behind.
    policy.logprobs_of([random_sequences(2)])
    saved = load_file(tmp_path / "model.safetensors")
    expected = {name: weight.float() for name, weight in saved.items()}
    torch.testing.assert_close(weights_of(policy), expected, rtol=0, atol=0)


def test_a_buffer_that_bfloat16_would_round_is_not_rounded(tmp_path):
    """The scale of a Gemma's embedding is a buffer, √40."""
    config = tiny_config("gemma3_text", hidden_size=40)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    embedding = load(make_config(str(tmp_path))).module.model.model.embed_tokens
    assert embedding.embed_scale.item() == pytest.approx(40**0.5, abs=1e-6)


def test_every_linear_layer_of_every_block_has_an_adapter_that_begins_at_zero(model):
    """A is random, by the seed, and B is zero."""
    policies = [load(make_config(model, lora_rank=2, seed=seed)) for seed in (0, 0, 1)]
    first, same, other = (dict(named_adapters(policy.module.model)) for policy in policies)
    blocks = policies[0].module.model.model.layers.named_modules(prefix="model.layers")
    linear = [name for name, part in blocks if isinstance(part, torch.nn.Linear)]
    assert len(linear) == 2 * 7
    assert first.keys() == {f"{name}.lora_{letter}" for name in linear for letter in "AB"}
    for name, adapter in first.items():
        is_zero = name.endswith("B")
        bound = 0 if is_zero else adapter.shape[1] ** -0.5
        assert 0.9 * bound <= gather(adapter).abs().max() <= bound
        assert torch.equal(adapter, same[name])
        assert torch.equal(adapter, other[name]) == is_zero


# Models that are refused


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (
            {"attention_bias": True},
            r"its safetensors lack \S+.0.self_attn.k_proj.bias, \S+, \S+, ..., which its config",
        ),
        (
            {"vocab_size": 200},
            r"\S+.weight is \[150, 64\] in its safetensors and \[200, 64\] by its config.json",
        ),
        (
            {"tie_word_embeddings": True},
            r"its config.json says that head and embedding are one \(tie_word_embeddings\), and its safetensors have",
        ),
    ],
    ids=str,
)
def test_a_folder_whose_parts_are_not_of_one_model_is_refused(untied, tmp_path, change, line):
    folder = str(shutil.copytree(untied, tmp_path / "model"))
    AutoConfig.from_pretrained(folder, **change).save_pretrained(folder)
    with pytest.raises(ValueError, match=f"--model {folder}: {line}"):
        load(make_config(folder))


def test_a_model_without_linear_layers_has_none_to_adapt_and_one_without_experts_none_to_balance(
    model,
):
    with pytest.raises(ValueError, match="--lora-rank 2: no linear layer to adapt in Embedding"):
        add_adapters(torch.nn.Embedding(2, 2), [torch.nn.Embedding(2, 2)], 2)
    with pytest.raises(
        ValueError, match=r"^--optim.seq-aux-loss-coef 0.7 balances experts, and a qwen3 has"
    ):
        check_model(make_config(model, optim=BALANCE), model, "cpu")
