import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from tiny_policy import assert_same_gradient, brute_force_nucleus, random_sequences, save_tiny_model
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from algos.sampling import Sampling
from asyncrl.trainer.logprobs import TokenLogprobs
from asyncrl.trainer.packing import MicroBatch, bundle, pack

ALL_ROWS, RAW = 1_000_000, Sampling()


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    return save_tiny_model(str(tmp_path_factory.mktemp("tied")), tied=True)


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    return save_tiny_model(str(tmp_path_factory.mktemp("untied")), tied=False)


def score(model, batch: MicroBatch, sampling=RAW, chunk_rows=ALL_ROWS):
    """Log-probs and entropy of the trained tokens."""
    module = TokenLogprobs(model, chunk_rows)
    return module(batch.input_ids, batch.position_ids, batch.sources, batch.targets, sampling)


def test_one_long_row_gives_the_same_logprobs_as_short_rows(tied):
    model, sequences = AutoModelForCausalLM.from_pretrained(tied).eval(), random_sequences(12)
    results = [score(model, pack(bundle(sequences), one_row))[0] for one_row in (True, False)]
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


def test_the_backward_pass_does_not_compute_the_entropy_again(tied):
    model, batch = (
        AutoModelForCausalLM.from_pretrained(tied).eval(),
        pack(bundle(random_sequences(3)), one_row=False),
    )
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        score(model, batch)[0].sum().backward()
    counts = {event.key: event.count for event in recorded.key_averages()}
    assert counts["aten::special_entr"] == 1 and counts["aten::_log_softmax"] == 2


def test_entropy_is_that_of_the_transformed_distribution(tied):
    model, sequences = AutoModelForCausalLM.from_pretrained(tied).eval(), random_sequences(3)
    batch = pack(bundle(sequences), one_row=False)
    _, entropy, _ = score(model, batch, Sampling(top_p=0.5))
    logits = model(torch.from_numpy(sequences[0].tokens)[None]).logits[0]
    for t, row in enumerate(logits[np.flatnonzero(sequences[0].loss_mask) - 1]):
        probs = brute_force_nucleus(row, int(batch.targets[t]), 1.0, 0.5).softmax(dim=-1)
        expected = -sum(p * math.log(p) for p in probs.tolist() if p > 0)
        assert entropy[t].item() == pytest.approx(expected, abs=1e-4)
    assert not entropy.requires_grad


# The head in chunks


def gradient_of(path, dtype, sampling, chunk_rows):
    """Log-probs of random tokens, and the gradient of their sum, each weighed by a random advantage."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    batch = pack(bundle(random_sequences(12)), one_row=False)
    advantages = torch.randn(len(batch.targets), generator=torch.Generator().manual_seed(0))
    logprobs, entropy, _ = score(model, batch, sampling, chunk_rows)
    (logprobs * advantages).sum().backward()
    return (
        logprobs.detach(),
        entropy,
        {name: p.grad.float() for name, p in model.named_parameters()},
    )


@pytest.mark.parametrize(
    "sampling", [Sampling(0.8), Sampling(0.8, 0.9), Sampling(0.8, 0.9, 20, 0.01)]
)
@pytest.mark.parametrize(("dtype", "relative"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-6)])
@pytest.mark.parametrize("tying", ["tied", "untied"])
def test_the_head_in_chunks_gives_values_and_gradients_of_the_head_at_once(
    tying, dtype, relative, sampling, request
):
    path = request.getfixturevalue(tying)
    logprobs, entropy, gradient = gradient_of(path, dtype, sampling, ALL_ROWS)
    for chunk_rows in (1, 7, 64):
        mine = gradient_of(path, dtype, sampling, chunk_rows)
        # In bfloat16 a product of other rows may round its sums otherwise: the logits differ by their last bit.
        torch.testing.assert_close(mine[:2], (logprobs, entropy), rtol=relative, atol=relative)
        # One chunk is one term of the weight's gradient, which autograd sums in bfloat16 (2⁻⁸ per sum).
        assert_same_gradient(
            mine[2], gradient, relative=relative * math.sqrt(len(logprobs) / chunk_rows)
        )


def test_bfloat16_weights_give_a_float32_log_softmax_of_their_logits(untied):
    model = AutoModelForCausalLM.from_pretrained(untied, dtype=torch.bfloat16).eval()
    (sequence,) = random_sequences(1)
    logprobs, entropy, _ = score(model, pack(bundle([sequence]), one_row=False))
    assert logprobs.dtype == entropy.dtype == torch.float32
    logits = model(torch.from_numpy(sequence.tokens)[None]).logits[0].double()
    places = np.flatnonzero(sequence.loss_mask)
    exact = logits[places - 1].log_softmax(dim=-1)
    targets = torch.from_numpy(sequence.tokens[places])[:, None]
    torch.testing.assert_close(
        logprobs.double(), exact.gather(1, targets).squeeze(1), rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(
        entropy.double(), -(exact.exp() * exact).sum(dim=-1), rtol=1e-5, atol=1e-5
    )


# Memory


@dataclass(frozen=True)
class Shape:
    """A model that is nearly all head, and as many tokens as have far larger logits than weights."""

    vocab: int = 8000
    tokens: int = 1024
    hidden: int = 16


def peak_bytes(function) -> int:
    """Most bytes that the CPU allocator had handed out during a call, beyond those at its start."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    assert events
    return int(np.cumsum([e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]).max())


def peak_of_head(shape: Shape, chunk_rows: int, sampling: Sampling, dtype: torch.dtype) -> int:
    """Peak of one forward and backward pass, bytes."""
    config = Qwen3Config(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=16,
        intermediate_size=16,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config).to(dtype).eval()
    ids = torch.randint(0, shape.vocab, (shape.tokens // 32, 32))
    module = TokenLogprobs(model, chunk_rows)
    args = (
        ids,
        torch.arange(32).expand_as(ids),
        torch.arange(shape.tokens),
        ids.flatten(),
        sampling,
    )
    return peak_bytes(lambda: module(*args)[0].sum().backward())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("sampling", "factor"),
    [
        (Sampling(0.9), 3),
        (Sampling(0.9, 0.9), 6),
        (Sampling(0.9, 0.9, 20, 0.1), 6),
        (Sampling(0.9, 1.0, 20, 0.1), 4),
    ],
)
def test_memory_is_the_stated_multiple_of_one_chunk_of_logits_and_not_of_all(
    sampling, factor, dtype
):
    shape = Shape()
    of_a_row = shape.vocab * 4
    # gradients of embedding and head; a layer over 1024 tokens
    rest = 3 * shape.vocab * shape.hidden * 4 + 2**21
    peaks = {rows: peak_of_head(shape, rows, sampling, dtype) for rows in (64, 128)}
    for rows, peak in peaks.items():
        assert peak < factor * rows * of_a_row + rest, (rows, peak)
    per_row = (peaks[128] - peaks[64]) / 64
    assert 0.8 * factor < per_row / of_a_row <= factor + 0.01
    if (sampling, dtype) == (Sampling(0.9), torch.float32):
        assert (
            peak_of_head(shape, ALL_ROWS, sampling, dtype) > 0.9 * factor * shape.tokens * of_a_row
        )
