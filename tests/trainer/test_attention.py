"""A prompt that is read once gives the log-probs and the gradient of one that is read for every response."""

import functools

import pytest
import torch
from test_policy import AGGREGATIONS, make_config, plain_gradient, plain_logprobs
from tiny_policy import (
    VOCAB,
    assert_same_gradient,
    first_gradient,
    grouped_sequences,
    load,
    random_sequences,
    save_tiny_model,
)
from transformers import AutoModelForCausalLM, Gemma2Config, GPT2Config, GPT2Model, MistralConfig, Qwen3Config

from algos.sampling import Sampling
from trainer.attention import _block_mask_maker, attention_inputs, check_shares_prefix, dense_mask, mask_function
from trainer.batch import distribute
from trainer.logprobs import TokenLogprobs
from trainer.packing import bundle, pack

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    return save_tiny_model(str(tmp_path_factory.mktemp("untied")), tied=False)


@pytest.mark.parametrize("budget", [40, 90, 100_000])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_sharing_prompts_leaves_the_gradient_that_of_the_definition(untied, aggregation, budget):
    """Tolerance, in float32: 1e-4 of the loss, 1e-5 of each parameter's largest gradient."""
    sequences = grouped_sequences(5, 4, seed=3) + random_sequences(3)
    policy = load(make_config(untied, loss_aggregation=aggregation, share_prefix=True))
    metrics = policy.train_step(distribute([sequences], 1, budget, True)[0], policy_version=12)
    loss, gradient = plain_gradient(untied, sequences, aggregation, policy.config.max_response_tokens)
    assert metrics["loss"] == pytest.approx(loss, rel=1e-4)
    assert_same_gradient(first_gradient(policy), gradient)
    total = sum(len(s.tokens) for s in sequences)
    assert metrics["tokens/saved_share"] == pytest.approx(1 - metrics["tokens/forward"] / total)
    assert budget == 40 or metrics["tokens/forward"] < 0.9 * total


def test_the_reference_and_the_proximal_policy_read_shared_prompts_too(untied):
    sequences = grouped_sequences(4, 4)
    options = {"kl_coef": 0.1, "minibatches": 2, "lr": 1e-3, "optim_args": ("warmup=0",)}
    traces = []
    for share_prefix in (False, True):
        policy = load(make_config(untied, share_prefix=share_prefix, **options))
        shares = distribute([sequences[:8], sequences[8:]], 1, 200, share_prefix)[0]
        traces.append([policy.train_step(shares, policy_version=12 + step) for step in range(2)])
    for plain, shared in zip(*traces, strict=True):
        assert shared.pop("tokens/forward") < plain.pop("tokens/forward")
        assert shared.pop("tokens/saved_share") > plain.pop("tokens/saved_share") == 0
        assert shared == pytest.approx(plain, rel=1e-3, abs=1e-5)


def test_in_float64_hidden_states_and_gradients_differ_by_rounding_only():
    """Tolerance: 1e-12 of a hidden state, 1e-12 of each parameter's largest gradient.

    In a GPT-2, as the norms of Qwen3 and Llama compute in float32 whatever they are given.
    """
    torch.manual_seed(0)
    model = GPT2Model(GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64)).double().eval()
    weights = None
    found = []
    for share_prefix in (False, True):
        batch = pack(bundle(grouped_sequences(4, 4), share_prefix), one_row=False, share_prefix=share_prefix)
        seen = attention_inputs("sdpa", batch.position_ids, batch.segment_ids, batch.prefix_ids)
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
    sequences = grouped_sequences(4, 4)
    model = AutoModelForCausalLM.from_pretrained(untied, attn_implementation="flex_attention").eval()
    module = TokenLogprobs(model)
    batch = pack(bundle(sequences, True), module.one_row, share_prefix=True)
    assert batch.input_ids.shape[0] == 1
    inputs = (batch.input_ids, batch.position_ids, batch.sources, batch.targets, Sampling())
    with torch.compiler.set_stance("force_eager"):
        logprobs, _ = module(*inputs, segment_ids=batch.segment_ids, prefix_ids=batch.prefix_ids)
    torch.testing.assert_close(logprobs, plain_logprobs(untied, sequences), rtol=1e-5, atol=1e-5)


def test_the_mask_s_maker_is_compiled_once_for_all_widths(monkeypatch):
    """On a GPU. Here by dynamo alone, which makes the graphs that inductor would compile."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    make = _block_mask_maker.__wrapped__("cuda")
    for width in (256, 384, 1280, 512):
        ids = (torch.arange(width) // 50 * 50)[None]
        mask = make(mask_function(ids, ids), 1, None, width, width, ids.device)
        assert torch.equal(mask.to_dense()[0, 0], dense_blocks(dense_mask(ids, ids)[0, 0]))
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
    ],
)
def test_a_model_that_reads_by_columns_of_the_row_is_refused(config, reason):
    with pytest.raises(ValueError, match=f"needs full attention in every layer, m has {reason}"):
        check_shares_prefix(config, "m")
    check_shares_prefix(Qwen3Config(num_hidden_layers=2), "m")
