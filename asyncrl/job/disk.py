"""Check before a run starts whether the disk has room for its checkpoints."""

import math
import shutil
from pathlib import Path

from asyncrl.config import Config
from asyncrl.runlog.manifest import KEPT_TO_RESUME

WEIGHTS_BYTES = 4
"""Bytes per parameter of the weights for people: float32."""
TRAINED_BYTES = 12
"""Bytes per trained parameter of the shards to continue from: the weight and the two moments of AdamW."""


def checkpoint_bytes(config: Config, num_parameters: int, device: str) -> tuple[int, int]:
    """Return the bytes of a checkpoint: weights for people, and what --resume needs.

    Adapters are not counted. Every optimizer is taken for AdamW.
    """
    engine_bytes = 4 if config.dtype_on(device) == "float32" else 2
    if config.save == "weights":
        return engine_bytes * num_parameters, 0
    to_resume = config.publish_delay * engine_bytes + (0 if config.lora_rank else TRAINED_BYTES)
    return WEIGHTS_BYTES * num_parameters, to_resume * num_parameters


def num_checkpoints(config: Config, first_version: int) -> int:
    """Return how many checkpoints a run writes after a version; 1 if only the last step or a signal causes one."""
    if not config.save_every:
        return 1
    return math.ceil(config.steps / config.save_every) - first_version // config.save_every


def max_bytes_on_disk(config: Config, num_saved: int, sizes: tuple[int, int]) -> int:
    """Return the most bytes that checkpoints have on disk until `num_saved` are written.

    A new checkpoint is written before an old one is deleted.
    """
    weights, to_resume = sizes
    num_whole = min(num_saved, (config.keep_last or KEPT_TO_RESUME) + 1)
    num_weights = num_whole if config.keep_last else num_saved
    return num_weights * weights + num_whole * to_resume


def free_bytes(folder: str) -> int:
    """Return the free bytes of the disk that has a folder, or that would have it."""
    path = Path(folder).absolute()
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def check_room(config: Config, sizes: tuple[int, int], first_version: int) -> str:
    """Return a line on the disk and the checkpoints that a run writes after version `first_version`.

    Raises ValueError, in one line, if the disk lacks room for the first two, or for the only one.
    """
    free = free_bytes(config.runs_dir)
    num_saved = num_checkpoints(config, first_version)
    # A resumed run has the first of two checkpoints already.
    at_first = max_bytes_on_disk(config, min(num_saved, 1 if first_version else 2), sizes)
    at_last = max_bytes_on_disk(config, num_saved, sizes)
    each = f"checkpoints: {format_bytes(sum(sizes))} each"
    room = f"{format_bytes(free)} are free in {config.runs_dir}"
    if at_first > free:
        is_beside = num_saved > 1 and not first_version
        beside = ", as the second is written beside the first" * is_beside
        raise ValueError(
            f"{each}, {format_bytes(at_first)} at first{beside}, {format_bytes(at_last)} at most, and {room}; make "
            "room, or change --runs-dir; "
            "--save weights saves nothing for --resume, --save-every 0 only the last step, None only when it is stopped"
        )
    if at_last > free:
        return (
            f"warning: {each}, {format_bytes(at_last)} at most, and {room}; the run ends when one does not fit; "
            "--keep-last N deletes older ones"
        )
    return f"{each}, {format_bytes(at_last)} at most, and {room}; --keep-last N deletes older ones"


def format_bytes(num_bytes: float) -> str:
    """Return a size in MB, GB or TB, for example 131 GB."""
    power = min(4, max(2, int(math.log(max(1, num_bytes), 1000))))
    return f"{num_bytes / 1000**power:.3g} {'MGT'[power - 2]}B"
