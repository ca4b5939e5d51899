"""Messages between a host of the swarm and its run, and all messages as bytes.

The messages of engines are in asyncrl/messages.py. Here are the messages of the host itself. A message as bytes has its
kind, and its fields in plain data (asyncrl/runlog/plain.py). The kind is the name of a class that can come from that
side. A message is never a pickle, because a pickle can run code. Other bytes raise ValueError.
"""

import json
import struct
from collections.abc import Iterable
from dataclasses import dataclass

from zmq.utils import z85

from asyncrl.messages import (
    Abort,
    Connect,
    Finished,
    Idle,
    LoadWeights,
    Probed,
    Ready,
    Suspend,
    Tickets,
    WeightsLoaded,
)
from asyncrl.runlog import plain

PROTOCOL = 6
"""Number of this page and of asyncrl/messages.py; a host that has another is refused."""
BEAT_S, SILENCE_S = 2.0, 15.0
"""Seconds between two signs of life. After SILENCE_S without one the other side counts as gone."""
JOIN_S = 60.0
"""Time that a run has to answer a host."""
HOST = -1
"""Stands for the host itself in place of an engine's number."""

# Messages


@dataclass(frozen=True)
class Join:
    """Host: I ask to sample for this run."""

    protocol: int
    code: str
    """Digest of the source files."""
    device: str
    """`cpu` or `cuda`."""
    host: str
    """Name of the host, for people."""
    unix_time: float
    """Its clock, seconds. The run corrects the host's times by the difference to its own clock."""


@dataclass(frozen=True)
class Welcome:
    """Run: sample with these options and this model, whose weights are to be pulled."""

    options: dict
    model_files: dict[str, bytes]
    """Files of the model's folder, by name: its configuration and its tokenizer."""
    user_code_digest: str = ""
    """Digest of user code (asyncrl/user_code.py). The host must have that code in the folder that it is started in."""


@dataclass(frozen=True)
class Refused:
    """Run: you cannot sample here; the host ends."""

    reason: str


@dataclass(frozen=True)
class JoinAt:
    """Run: join another node of mine. It has fewer workers."""

    address: str


@dataclass(frozen=True)
class JoinAgain:
    """Run: this connection has not joined, or was given up. The tickets of the host are void."""


@dataclass(frozen=True)
class Beat:
    """Either side: I am there."""


@dataclass(frozen=True)
class Leave:
    """Host: I leave. Run: it has ended."""


@dataclass(frozen=True)
class Pull:
    """Host: send a piece of the delta from `base` to `version`, or of the whole snapshot."""

    version: int
    base: int | None
    offset: int
    """Bytes that the host has already."""


@dataclass(frozen=True)
class Piece:
    """Run: a piece of a delta or snapshot."""

    version: int
    is_delta: bool
    num_bytes: int
    """Size of the whole delta or snapshot."""
    offset: int
    data: bytes


@dataclass(frozen=True)
class Fetch:
    """Run: fetch these weights to the host of an engine, while it samples on, and report it."""

    version: int
    infos: list[dict]
    """The snapshot to pull; see extras/swarm/pull.py."""


@dataclass(frozen=True)
class Fetched:
    """Host: the weights that were to come for an engine are there, and can be loaded at once."""

    version: int


TO_ENGINE = (Tickets, Connect, Fetch, LoadWeights, Abort, Suspend, Idle)
FROM_ENGINE = (Ready, Fetched, WeightsLoaded, Probed, Finished)
TO_HOST = (Welcome, Refused, JoinAt, JoinAgain, Beat, Leave, Piece)
FROM_HOST = (Join, Beat, Leave, Pull)


# Bytes


def encode(message: object) -> tuple[bytes, bytes]:
    """Return a message's kind and fields."""
    return type(message).__name__.encode(), plain.encode(message)


def decode(kind: bytes, fields: bytes, classes: Iterable[type]) -> object:
    """Return the message of one of these classes. Raises ValueError for another kind, or for wrong fields."""
    kinds = {message_class.__name__.encode(): message_class for message_class in classes}
    if kind not in kinds:
        raise ValueError(f"a message of kind {kind[:40]!r}, not one of {sorted(kinds)}")
    return plain.decode(kinds[kind], fields)


def printable(text: str) -> str:
    """Return a stranger's text for one line of a terminal."""
    return "".join(c if c.isprintable() else "?" for c in text)


def read_key(path: str) -> tuple[bytes, bytes, bytes]:
    """Return the run's public key and the hosts' public and secret key. Raises ValueError for another file."""
    try:
        with open(path, encoding="utf-8") as file:
            keys = json.load(file)
        found = tuple(keys[name].encode() for name in ("run", "machine", "machine_secret"))
        if any(len(z85.decode(key)) != 32 for key in found):
            raise ValueError("its keys are not of 32 bytes")
        return found
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise ValueError(
            f"--key {path} cannot be read ({error}); copy runs/NAME/swarm.key of the run"
        ) from None
