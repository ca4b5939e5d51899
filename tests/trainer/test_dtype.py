"""Which dtype `--dtype auto` takes on a CPU."""

import re

import pytest
from transformers import LlamaConfig, Qwen3NextConfig

from asyncrl.trainer.dtype import MIN_GAIN, SMALLEST_MODEL, choose_dtype

MODEL = LlamaConfig(hidden_size=576, intermediate_size=1536, num_attention_heads=9)


@pytest.mark.parametrize(
    "dtype, model, num_parameters, chosen",
    [
        ("float16", MODEL, 10**9, "float16"),
        ("auto", Qwen3NextConfig(), 10**5, "bfloat16"),
        ("auto", MODEL, SMALLEST_MODEL - 1, "float32"),
    ],
)
def test_a_small_model_and_one_with_a_single_dtype_are_not_measured(
    dtype, model, num_parameters, chosen
):
    actual, line = choose_dtype(dtype, model, num_parameters)
    assert actual == chosen and line.startswith(f"dtype: {chosen}") and "GFLOP/s" not in line


def test_auto_takes_the_dtype_that_was_measured_to_be_faster():
    dtype, line = choose_dtype("auto", MODEL, 135 * 10**6)
    speeds = [float(text.replace(",", "")) for text in re.findall(r"([\d,.]+) in", line)]
    float32, bfloat16 = speeds
    assert dtype == ("bfloat16" if bfloat16 > MIN_GAIN * float32 else "float32")
    assert float32 > 0.1 and bfloat16 > 0.1
