"""The head in chunks: its values and its gradient. extras/planning/tests/test_memory_of_a_step.py has its memory."""

import pytest
import torch
from tiny_families import packed_scores
from tiny_policy import random_sequences
from transformers import AutoModelForCausalLM

from asyncrl.trainer.logprobs import TokenLogprobs


@pytest.mark.parametrize(("chunk_rows", "tolerance"), [(7, 2**-6), (1024, 1e-5)])
@torch.no_grad()
def test_bfloat16_weights_give_a_float32_log_softmax_of_their_logits(untied, chunk_rows, tolerance):
    """A product of other rows rounds its sums otherwise: the logits differ by their last bit."""
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(untied, dtype=torch.bfloat16).eval()
    (sequence,) = random_sequences(1)
    found = packed_scores(TokenLogprobs(model, chunk_rows), [sequence], "short_rows")
    tokens = torch.from_numpy(sequence.tokens)
    exact = model(tokens[None]).logits[0, :-1].double().log_softmax(dim=-1)
    expected = exact.gather(1, tokens[1:, None])[sequence.loss_mask[1:], 0]
    torch.testing.assert_close(found, expected.float(), rtol=tolerance, atol=tolerance)
