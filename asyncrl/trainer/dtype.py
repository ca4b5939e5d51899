"""Chooses the dtype of computing on a CPU by measuring it: which one is faster differs between CPUs."""

import torch
from torch.nn.functional import linear
from torch.utils.benchmark import Timer
from transformers import PreTrainedConfig

from asyncrl.trainer.families import BFLOAT16_ON_CPU

SMALLEST_MODEL = 10_000_000
"""Parameters of the smallest model whose matrix products take most of a step."""
MIN_GAIN = 1.2
"""Smallest speed-up of bfloat16 over float32 that is worth its rounding."""
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


def measure_rates(model: PreTrainedConfig) -> dict[str, float]:
    """Return the speed of a model's largest linear layer by dtype, GFLOP/s.

    The best product counts: other processes can only make one slower.
    """
    text = model.get_text_config()
    width = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    operations = 2 * NUM_TOKENS * text.hidden_size * width
    rates = {}
    for name in ("float32", "bfloat16"):
        dtype = getattr(torch, name)
        product = {
            "linear": linear,
            "inputs": torch.randn(NUM_TOKENS, text.hidden_size, dtype=dtype),
            "weight": torch.randn(width, text.hidden_size, dtype=dtype),
        }
        timer = Timer(
            "linear(inputs, weight)", globals=product, num_threads=torch.get_num_threads()
        )
        times = timer.blocked_autorange(min_run_time=DURATION_S).times
        rates[name] = operations / min(times) / 1e9
    return rates
