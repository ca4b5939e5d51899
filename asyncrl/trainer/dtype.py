"""Chooses the dtype of computing on a CPU by measuring it: which one is faster differs between CPUs."""

import time

import torch
from torch.nn.functional import linear
from transformers import PreTrainedConfig

from asyncrl.trainer.families import BFLOAT16_ON_CPU

SMALLEST_MODEL = 10_000_000
"""Parameters from which products of matrices take most of a step."""
MIN_GAIN = 1.2
"""Speed of bfloat16 against float32 from which its rounding is worth it."""
NUM_TOKENS = 64
DURATION_S = 0.05


def choose_dtype(dtype: str, model: PreTrainedConfig, num_parameters: int) -> tuple[str, str]:
    """Return the dtype for `--dtype` on a CPU, and a line about it; `auto` measures if the model is large."""
    if dtype != "auto":
        return dtype, f"dtype: {dtype}"
    if model.model_type in BFLOAT16_ON_CPU:
        return "bfloat16", f"dtype: bfloat16, the only one of vLLM for {model.model_type} on a CPU"
    if num_parameters < SMALLEST_MODEL:
        return "float32", f"dtype: float32, the default for {num_parameters:,} parameters on a CPU"
    rates = measure_rates(model)
    is_faster = rates["bfloat16"] > MIN_GAIN * rates["float32"]
    dtype = "bfloat16" if is_faster else "float32"
    shown = " and ".join(f"{rate:,.1f} in {name}" for name, rate in rates.items())
    return dtype, f"dtype: {dtype}; a layer has these GFLOP/s here: {shown}"


@torch.no_grad()
def measure_rates(model: PreTrainedConfig) -> dict[str, float]:
    """Return the speed of a model's largest linear layer by dtype, GFLOP/s.

    The dtypes alternate, and the best product counts: other processes can only make one slower. The first products are
    not timed, because the library compiles its kernel in them.
    """
    text = model.get_text_config()
    width = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    inputs, weight = torch.randn(NUM_TOKENS, text.hidden_size), torch.randn(width, text.hidden_size)
    operations = 2 * NUM_TOKENS * text.hidden_size * width
    tensors = {}
    for name in ("float32", "bfloat16"):
        dtype = getattr(torch, name)
        tensors[name] = inputs.to(dtype), weight.to(dtype)
        linear(*tensors[name])
    rates = dict.fromkeys(tensors, 0.0)
    end = time.perf_counter() + DURATION_S
    while min(rates.values()) == 0 or time.perf_counter() < end:
        for name, arguments in tensors.items():
            start = time.perf_counter()
            linear(*arguments)
            elapsed = time.perf_counter() - start
            rates[name] = max(rates[name], operations / elapsed / 1e9)
    return rates
