"""Check before a run on CPUs starts that the host has memory for its weights and held-back versions.

The host of GPUs is checked by extras/planning.
"""

import psutil

from asyncrl.config import Config
from asyncrl.job.disk import format_bytes

TRAINED_BYTES = 16
"""Bytes per trained parameter on a CPU: weight, gradient and the two moments of AdamW, in float32."""
SENT_COPIES = 3
"""Copies of the weights for an engine on a CPU: two buffers to send them, and the engine's."""


def least_bytes(config: Config, num_parameters: int) -> int:
    """Return the least host memory that a run on CPUs needs, bytes. Adapters and activations are not counted."""
    engine_bytes = 4 if config.dtype_on("cpu") == "float32" else 2
    num_held_back = config.publish_delay + 1 if config.publish_delay else 0
    trained_bytes = 0 if config.lora_rank else TRAINED_BYTES
    return (trained_bytes + (SENT_COPIES + num_held_back) * engine_bytes) * num_parameters


def check_host_memory(config: Config, num_parameters: int) -> None:
    """Raise ValueError if the free memory of this host is less than a run on CPUs needs at least."""
    needed = least_bytes(config, num_parameters)
    free = psutil.virtual_memory().available
    if needed <= free:
        return
    held_back = ""
    delay = config.publish_delay
    if delay:
        held_back = f", with {delay + 1} versions of the weights for --publish-delay {delay}"
    raise ValueError(
        f"the run needs at least {format_bytes(needed)} of host memory{held_back}, and {format_bytes(free)} are free; "
        "use a smaller --model, a lower --publish-delay, or end other processes"
    )
