"""Messages as bytes: msgpack of the records of data/messages.py, and of nothing else.

No pickle, which would run what a stranger sends. A message is its kind, the name of a class that may come from that
side, and its fields; arrays are dtype, shape and bytes, of the dtypes that records have. All else is a ValueError.
"""

import json
import math
import struct

import msgspec
import numpy as np
from zmq.utils import z85

DTYPES = ("<i8", "|b1", "<f4", "<i4")
"""Of the arrays in records; bytes of any other are refused."""


class Codec:
    """Encodes messages of some classes, and decodes those of others."""

    def __init__(self, received: tuple[type, ...]):
        """`received` are the classes that may come from the other side."""
        self._encode = msgspec.msgpack.Encoder(enc_hook=_plain).encode
        self._decoders = {
            kind.__name__.encode(): msgspec.msgpack.Decoder(kind, dec_hook=_array).decode for kind in received
        }

    def encode(self, message: object) -> tuple[bytes, bytes]:
        """A message's kind and fields."""
        return type(message).__name__.encode(), self._encode(message)

    def decode(self, kind: bytes, fields: bytes) -> object:
        """The message. Raises ValueError if its kind may not come from there, or its fields are not of it."""
        if kind not in self._decoders:
            raise ValueError(f"a message of kind {kind[:40]!r}, not one of {sorted(self._decoders)}")
        try:
            return self._decoders[kind](fields)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:  # the last for lists in lists in lists
            raise ValueError(f"a broken {kind.decode()}: {error}") from None


def _plain(value: object) -> object:
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, np.ascontiguousarray(value).tobytes()
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} is not sent")


def _array(kind: type, value: object) -> np.ndarray:
    if kind is not np.ndarray:
        raise TypeError(f"{kind} is not received")
    match value:
        case [str(dtype), [*shape], bytes(data)] if dtype in DTYPES and all(type(n) is int and n >= 0 for n in shape):
            is_whole = len(data) == math.prod(shape) * np.dtype(dtype).itemsize
            if is_whole and (dtype != "|b1" or not data.translate(None, b"\0\1")):  # numpy sums what another byte says
                return np.frombuffer(data, dtype).reshape(shape)
    raise ValueError("an array is dtype, shape and as many bytes as these have")


BEAT_S, SILENCE_S = 2.0, 15.0
"""Between two signs of life; without one for so long, the other side is taken for gone."""
JOIN_S = 60.0
"""Time that a run has to answer a machine."""
MACHINE = b"-"
"""In place of an engine's number: of the machine itself."""


def read_key(path: str) -> tuple[bytes, bytes, bytes]:
    """The run's public key and the machines' public and secret, from a key file. Raises ValueError if it is none."""
    try:
        with open(path, encoding="utf-8") as file:
            keys = json.load(file)
        found = tuple(keys[name].encode() for name in ("run", "machine", "machine_secret"))
        if any(len(z85.decode(key)) != 32 for key in found):
            raise ValueError("its keys are not of 32 bytes")
        return found
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise ValueError(f"--key {path} cannot be read ({error}); copy runs/NAME/swarm.key of the run") from None
