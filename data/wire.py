"""Messages as bytes: msgpack of the records of data/messages.py, and of nothing else.

A message is its kind, the name of a class that may come from that side, and its fields, as data/plain.py writes them:
no pickle, which would run what a stranger sends. All else is a ValueError.
"""

import json
import struct

from zmq.utils import z85

from data import plain


class Codec:
    """Encodes messages of some classes, and decodes those of others."""

    def __init__(self, received: tuple[type, ...]):
        """`received` are the classes that may come from the other side."""
        self._kinds = {kind.__name__.encode(): kind for kind in received}

    def encode(self, message: object) -> tuple[bytes, bytes]:
        """A message's kind and fields."""
        return type(message).__name__.encode(), plain.encode(message)

    def decode(self, kind: bytes, fields: bytes) -> object:
        """The message. Raises ValueError if its kind may not come from there, or its fields are not of it."""
        if kind not in self._kinds:
            raise ValueError(f"a message of kind {kind[:40]!r}, not one of {sorted(self._kinds)}")
        return plain.decode(self._kinds[kind], fields)


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
