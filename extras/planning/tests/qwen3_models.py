"""Models of Qwen3 of which nothing is there but the config.json."""

import functools
import tempfile
from pathlib import Path

from extras.planning.shape import ModelShape, read_shape
from scripts.qwen3_shapes import qwen3_config

_FOLDER = tempfile.TemporaryDirectory()  # until the process ends


@functools.cache
def folder_of(size: str) -> str:
    """A folder with the config.json of a size."""
    folder = Path(_FOLDER.name) / size
    qwen3_config(size).save_pretrained(folder)
    return str(folder)


@functools.cache
def shape_of(size: str) -> ModelShape:
    """The shape of a size."""
    return read_shape(folder_of(size))
