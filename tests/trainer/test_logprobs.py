"""The head in chunks: its values and its gradient. extras/planning/tests/test_memory_of_a_step.py has its memory."""

import shutil

import numpy as np
import pytest
import torch
from tiny_policy import random_sequences
from transformers import AutoModelForCausalLM

from asyncrl.trainer.logprobs import TokenLogprobs
from asyncrl.trainer.model import compiled
from asyncrl.trainer.packing import bundle, pack
from asyncrl.trainer.sampling import Sampling

ALL_ROWS = 1_000_000


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
