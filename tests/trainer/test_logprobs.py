"""The head in chunks: its values, its gradient, and its memory."""

import shutil

import numpy as np
import pytest
import torch
from tiny_policy import random_sequences
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from asyncrl.trainer.logprobs import TokenLogprobs
from asyncrl.trainer.model import compiled
from asyncrl.trainer.packing import bundle, pack
from asyncrl.trainer.sampling import Sampling

ALL_ROWS = 1_000_000
VOCABULARY, HIDDEN, TOKENS = 8000, 16, 512
"""A model that is nearly all head, and as many tokens as have far larger logits than weights."""


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    torch.set_num_threads(1)


def score(model, sequences, chunk_rows=ALL_ROWS):
    """Log-probs and entropy of the trained tokens of sequences."""
    batch = pack(bundle(sequences), "short_rows")
    module = TokenLogprobs(model, chunk_rows)
    return module(batch.input_ids, batch.position_ids, batch.sources, batch.targets, Sampling())[:2]


@pytest.mark.parametrize("chunk_rows", [1, 7, ALL_ROWS])
def test_bfloat16_weights_give_a_float32_log_softmax_of_their_logits(untied, chunk_rows):
    """A product of other rows rounds its sums otherwise: the logits differ by their last bit."""
    model = AutoModelForCausalLM.from_pretrained(untied, dtype=torch.bfloat16).eval()
    (sequence,) = random_sequences(1)
    found = score(model, [sequence], chunk_rows)
    places = np.flatnonzero(sequence.loss_mask)
    logits = model(torch.from_numpy(sequence.tokens)[None]).logits[0, places - 1].double()
    exact = logits.log_softmax(dim=-1)
    targets = torch.from_numpy(sequence.tokens[places])[:, None]
    expected = exact.gather(1, targets).squeeze(1), -(exact.exp() * exact).sum(dim=-1)
    relative = 1e-5 if chunk_rows == ALL_ROWS else 2**-6
    for row, expected_row in zip(found, expected, strict=True):
        torch.testing.assert_close(row, expected_row.float(), rtol=relative, atol=relative)


def test_the_backward_pass_does_not_compute_the_entropy_again(untied):
    model = AutoModelForCausalLM.from_pretrained(untied).eval()
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        score(model, random_sequences(3))[0].sum().backward()
    counts = {event.key: event.count for event in recorded.key_averages()}
    assert counts["aten::special_entr"] == 1 and counts["aten::_log_softmax"] == 2


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.parametrize(
    ("dtype", "sampling"),
    [(torch.bfloat16, Sampling()), (torch.float32, Sampling(0.7, top_p=0.9, top_k=12))],
)
def test_a_compiled_head_has_the_scores_and_gradients_of_the_head_as_it_is(untied, dtype, sampling):
    """As a GPU has it, for chunks of one row and of several. Tolerance, in float32: 1e-6 nats."""
    model = AutoModelForCausalLM.from_pretrained(untied, dtype=dtype).eval()
    plain, fast = TokenLogprobs(model), TokenLogprobs(model)
    fast.score_rows = compiled(plain.score_rows)
    for num_rows in (1, 7, 40):
        rows = torch.randn(num_rows, model.config.hidden_size, dtype=dtype)
        targets = torch.randint(0, model.config.vocab_size, (num_rows,))
        results = []
        for module in (plain, fast):
            hidden = rows.clone().requires_grad_()
            logprobs, entropy = module.score_rows(hidden, targets, sampling)
            logprobs.sum().backward()
            results.append((logprobs, entropy, hidden.grad))
        for found, expected in zip(*results, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def peak_bytes(function) -> int:
    """Most bytes that the CPU allocator had handed out during a call, beyond those at its start."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    assert events
    return int(np.cumsum([e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]).max())


def peak_of_head(chunk_rows: int, sampling: Sampling, dtype: torch.dtype) -> int:
    """Peak of one forward and backward pass, bytes."""
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=16,
        intermediate_size=16,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    module = TokenLogprobs(Qwen3ForCausalLM(config).to(dtype).eval(), chunk_rows)
    ids = torch.randint(0, VOCABULARY, (TOKENS // 32, 32))
    positions = torch.arange(32).expand_as(ids)
    inputs = (ids, positions, torch.arange(TOKENS), ids.flatten(), sampling)
    return peak_bytes(lambda: module(*inputs)[0].sum().backward())


@pytest.mark.parametrize(
    ("sampling", "factor", "dtype"),
    [
        (Sampling(0.9), 3, torch.float32),
        (Sampling(0.9), 3, torch.bfloat16),
        (Sampling(0.9, 0.9), 6, torch.float32),
        (Sampling(0.9, 0.9, 20, 0.1), 6, torch.bfloat16),
        (Sampling(0.9, 1.0, 20, 0.1), 4, torch.float32),
    ],
)
def test_memory_is_the_stated_multiple_of_one_chunk_of_logits_and_not_of_all(
    sampling, factor, dtype
):
    row_bytes = VOCABULARY * 4
    # gradients of embedding and head; a layer over all tokens
    rest = 3 * VOCABULARY * HIDDEN * 4 + 2**21
    peaks = {rows: peak_of_head(rows, sampling, dtype) for rows in (64, 128)}
    for rows, peak in peaks.items():
        assert peak < factor * rows * row_bytes + rest, (rows, peak)
    per_row = (peaks[128] - peaks[64]) / 64
    assert 0.8 * factor < per_row / row_bytes <= factor + 0.01
    if (sampling, dtype) == (Sampling(0.9), torch.float32):
        peak = peak_of_head(ALL_ROWS, sampling, dtype)
        assert peak > 0.9 * factor * TOKENS * row_bytes
