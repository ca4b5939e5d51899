"""A prefix that is read once gives the log-probs and the gradient of one that is read for every sequence."""

import functools

import numpy as np
import pytest
import torch
from test_policy import AGGREGATIONS, make_config, plain_gradient, plain_logprobs, wide_clip
from tiny_policy import (
    VOCAB,
    assert_same_gradient,
    first_gradient,
    grouped_sequences,
    load,
    random_sequences,
    random_tree,
    save_tiny_model,
)
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    GPT2Model,
    LlamaConfig,
    MistralConfig,
    Qwen3Config,
    RecurrentGemmaConfig,
)

from algos import LOSSES
from algos.sampling import Sampling
from trainer.attention import _block_mask_maker, attention_inputs, check_layers, dense_mask, mask_function
from trainer.batch import distribute
from trainer.logprobs import TokenLogprobs
from trainer.lora import named_adapters
from trainer.packing import bundle, pack

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    return save_tiny_model(str(tmp_path_factory.mktemp("untied")), tied=False)


@pytest.mark.parametrize("sharing", ["prompt", "tree"])
@pytest.mark.parametrize("budget", [40, 90, 100_000])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_sharing_prompts_leaves_the_gradient_that_of_the_definition(untied, aggregation, budget, sharing):
    """Tolerance, in float32: 1e-4 of the loss, 1e-5 of each parameter's largest gradient."""
    sequences = grouped_sequences(5, 4, seed=3) + random_sequences(3)
    metrics = assert_gradient_of_the_definition(untied, sequences, aggregation, budget, sharing)
    assert budget == 40 or metrics["tokens/saved_share"] > 0.1


@pytest.mark.parametrize("budget", [35, 60, 100_000])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("seed", range(3))
def test_random_trees_have_the_gradient_of_the_definition(untied, aggregation, budget, seed):
    """Tokens that are trained in several branches, with another advantage in each; equal sequences; prefixes of others.

    Tolerance as above.
    """
    sequences = random_tree(12, seed)
    assert sum(s.num_trained for s in sequences) > 50
    metrics = assert_gradient_of_the_definition(untied, sequences, aggregation, budget, "tree")
    assert metrics["tokens/shareable"] >= metrics["tokens/saved_share"] > 0.15
    assert budget < 1000 or metrics["tokens/shareable"] == metrics["tokens/saved_share"] > 0.4


def assert_gradient_of_the_definition(path, sequences, aggregation, budget, sharing):
    policy = load(make_config(path, loss_aggregation=aggregation, share_prefix=sharing))
    metrics = policy.train_step(distribute([sequences], 1, budget, sharing)[0], policy_version=12)
    loss, gradient = plain_gradient(path, sequences, aggregation, policy.config.max_response_tokens)
    assert metrics["loss"] == pytest.approx(loss, rel=1e-4)
    assert_same_gradient(first_gradient(policy), gradient)
    total = sum(len(s.tokens) for s in sequences)
    assert metrics["tokens/saved_share"] == pytest.approx(1 - metrics["tokens/forward"] / total)
    return metrics


@pytest.mark.parametrize("algo", LOSSES)
def test_every_loss_has_the_same_gradient_on_a_tree_in_parts_as_on_single_sequences(untied, algo):
    """With a penalty to a reference; tolerance 1e-5 of each parameter's largest gradient, 1e-3 of the metrics."""
    sequences = random_tree(12, seed=1)
    found = {}
    for sharing in ("off", "prompt", "tree"):
        config = make_config(untied, algo=algo, share_prefix=sharing, kl_coef=0.1, **wide_clip(algo))
        policy = load(config)
        metrics = policy.train_step(distribute([sequences], 1, 60, sharing)[0], policy_version=12)
        read = metrics.pop("tokens/forward"), metrics.pop("tokens/saved_share")
        found[sharing] = (read, metrics, first_gradient(policy))
    (off, *_), (prompt, *_), (tree, *_) = found.values()
    assert tree[0] < prompt[0] <= off[0] and tree[1] > 0.2 and off[1] == 0
    for _, metrics, gradient in list(found.values())[1:]:
        assert metrics == pytest.approx(found["off"][1], rel=1e-3, abs=1e-5)
        assert_same_gradient(gradient, found["off"][2])


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_adapters_have_the_same_gradient_on_a_tree_as_on_single_sequences(untied, aggregation):
    """Of adapters that are no longer 0. Tolerance 1e-5 of each one's largest gradient."""
    sequences, found = random_tree(12, seed=2), []
    for sharing in ("off", "prompt", "tree"):
        policy = load(make_config(untied, lora_rank=4, loss_aggregation=aggregation, share_prefix=sharing))
        generator = torch.Generator().manual_seed(0)
        for _, adapter in named_adapters(policy.module.model):
            adapter.detach().to_local().normal_(std=0.05, generator=generator)
        policy.train_step(distribute([sequences], 1, 60, sharing)[0], policy_version=12)
        found.append(first_gradient(policy))
    assert len(found[0]) == 28 and min(gradient.abs().max() for gradient in found[0].values()) > 0
    assert_same_gradient(found[1], found[0])
    assert_same_gradient(found[2], found[0])


def test_the_reference_and_the_proximal_policy_read_shared_prefixes_too(untied):
    sequences = grouped_sequences(4, 4)
    options = {"kl_coef": 0.1, "minibatches": 2, "lr": 1e-3, "optim_args": ("warmup=0",)}
    traces = []
    for sharing in ("off", "prompt", "tree"):
        policy = load(make_config(untied, share_prefix=sharing, **options))
        shares = distribute([sequences[:8], sequences[8:]], 1, 200, sharing)[0]
        traces.append([policy.train_step(shares, policy_version=12 + step) for step in range(2)])
    for plain, *others in zip(*traces, strict=True):
        read, saved = plain.pop("tokens/forward"), plain.pop("tokens/saved_share")
        for shared in others:
            assert shared.pop("tokens/forward") < read and shared.pop("tokens/saved_share") > saved == 0
            assert shared == pytest.approx(plain, rel=1e-3, abs=1e-5)


def test_the_head_computes_a_token_of_several_branches_once(untied):
    sequences = random_tree(12, seed=4)
    module = load(make_config(untied, share_prefix="tree")).module
    rows = []
    module.model.get_output_embeddings().register_forward_pre_hook(lambda _, inputs: rows.append(len(inputs[0])))
    batch = pack(bundle(sequences, "tree"), module.one_row, "tree")
    inputs = (batch.input_ids, batch.position_ids, batch.sources, batch.targets, Sampling())
    with torch.no_grad():
        logprobs, entropy, _ = module(*inputs, batch.visible_until)
    trained = {tuple(s.tokens[: t + 1]) for s in sequences for t in np.flatnonzero(s.loss_mask)}
    assert sum(rows) == len(trained) < len(batch.targets) == len(logprobs) == len(entropy)
    in_order = [s for b in bundle(sequences, "tree") for s in b.sequences]
    torch.testing.assert_close(logprobs, plain_logprobs(untied, in_order), rtol=1e-5, atol=1e-5)


def test_in_float64_hidden_states_and_gradients_differ_by_rounding_only():
    """Tolerance: 1e-12 of a hidden state, 1e-12 of each parameter's largest gradient.

    In a GPT-2, as the norms of Qwen3 and Llama compute in float32 whatever they are given.
    """
    torch.manual_seed(0)
    model = GPT2Model(GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64)).double().eval()
    weights = None
    found = []
    sequences = [s for b in bundle(random_tree(12), "tree") for s in b.sequences]
    for sharing in ("off", "tree"):
        batch = pack(bundle(sequences, sharing), one_row=False, share_prefix=sharing)
        seen = attention_inputs("sdpa", batch.position_ids, batch.visible_until)
        hidden = model(batch.input_ids, position_ids=batch.position_ids, use_cache=False, **seen)[0]
        hidden = hidden.flatten(0, 1)[batch.sources]
        weights = torch.randn_like(hidden) if weights is None else weights
        model.zero_grad()
        (hidden * weights).sum().backward()
        found.append((hidden.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}))
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-12, atol=1e-12)
    assert_same_gradient(found[1][1], found[0][1], relative=1e-12)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")  # slower, but the same mask
@torch.no_grad()
def test_flexattention_s_mask_gives_the_logprobs_of_single_sequences(untied):
    bundles = bundle(random_tree(20, seed=5, system=0), "tree")
    model = AutoModelForCausalLM.from_pretrained(untied, attn_implementation="flex_attention").eval()
    module = TokenLogprobs(model)
    batch = pack(bundles, module.one_row, "tree")
    assert batch.input_ids.shape[0] == 1 and len(bundles) == 3
    inputs = (batch.input_ids, batch.position_ids, batch.sources, batch.targets, Sampling())
    with torch.compiler.set_stance("force_eager"):
        logprobs, *_ = module(*inputs, visible_until=batch.visible_until)
    in_order = [s for b in bundles for s in b.sequences]
    torch.testing.assert_close(logprobs, plain_logprobs(untied, in_order), rtol=1e-5, atol=1e-5)


def test_the_mask_s_maker_is_compiled_once_for_all_widths(monkeypatch):
    """On a GPU. Here by dynamo alone, which makes the graphs that inductor would compile."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    make = _block_mask_maker.__wrapped__("cuda")
    for width in (256, 384, 1280, 512):
        until = (torch.arange(width) // 50 * 50 + 50)[None]
        mask = make(mask_function(until), 1, None, width, width, until.device)
        assert torch.equal(mask.to_dense()[0, 0], dense_blocks(dense_mask(until)[0, 0]))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def dense_blocks(mask):
    """Which blocks of 128 × 128 have an entry, 0 or 1."""
    return mask.unflatten(0, (-1, 128)).unflatten(2, (-1, 128)).any(dim=3).any(dim=1).int()


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (Gemma2Config(num_hidden_layers=2), "sliding_attention"),
        (MistralConfig(sliding_window=64), "sliding_window 64"),
        (Qwen3Config(num_hidden_layers=2, use_sliding_window=True, max_window_layers=1), "sliding_attention"),
        (RecurrentGemmaConfig(), "sliding_window 2048"),
    ],
)
def test_a_model_that_reads_by_columns_of_the_row_is_refused(config, reason):
    with pytest.raises(ValueError, match=f"needs full attention in every layer, m has {reason}"):
        check_layers(config, "m", shares_prefix=True)
    for whole in (Qwen3Config(num_hidden_layers=2), LlamaConfig(), GPT2Config()):
        check_layers(whole, "m", shares_prefix=True)
