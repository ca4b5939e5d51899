"""What a host of the swarm and the run that it samples for say to each other, and all messages as bytes.

Engines of a host say and hear what asyncrl/messages.py has; here is what the host itself does. As bytes a message
is its kind, the name of a class that may come from that side, and its fields, as asyncrl/runlog/plain.py writes them:
no pickle, which would run what a stranger sends. All else is a ValueError.
"""

import hashlib
import json
import struct
from collections.abc import Iterable
from dataclasses import dataclass

from zmq.utils import z85

from asyncrl.cluster.fingerprint import fingerprint
from asyncrl.config import Config
from asyncrl.messages import (
    Abort,
    Connect,
    Finished,
    Idle,
    Probed,
    Ready,
    Suspend,
    Tickets,
    Update,
    Updated,
)
from asyncrl.runlog import plain
from asyncrl.user_code import files

PROTOCOL = 4
"""Number of this page and of asyncrl/messages.py; a host that has another is refused."""
BEAT_S, SILENCE_S = 2.0, 15.0
"""Between two signs of life; without one for so long, the other side is taken for gone."""
JOIN_S = 60.0
"""Time that a run has to answer a host."""
HOST = -1
"""In place of an engine's number: of the host itself."""

# Messages


@dataclass(frozen=True)
class Join:
    """Host: I would sample for this run."""

    protocol: int
    code: str
    """Digest of the source files."""
    device: str
    """`cpu` or `cuda`."""
    host: str
    """Name of the host, for people."""
    unix_time: float
    """Its clock, seconds: times that it says are moved by as much as that is off."""


@dataclass(frozen=True)
class Welcome:
    """Run: sample with these options and this model, whose weights are to be pulled."""

    options: dict
    model_files: dict[str, bytes]
    """Files of the model's folder, by name: its configuration and its tokenizer."""
    user_code_digest: str = ""
    """Of user code (asyncrl/user_code.py), which the host must have in the folder that it is started in."""


@dataclass(frozen=True)
class Refused:
    """Run: you cannot sample here; the host ends."""

    reason: str


@dataclass(frozen=True)
class JoinAt:
    """Run: join another of my nodes, which samples less."""

    address: str


@dataclass(frozen=True)
class JoinAgain:
    """Run: this connection has not joined, or was given up; what the host has of the run's tickets is void."""


@dataclass(frozen=True)
class Beat:
    """Either: I am there."""


@dataclass(frozen=True)
class Leave:
    """Host: I leave. Run: it has ended."""


@dataclass(frozen=True)
class Pull:
    """Host: send a piece of the way from `base`, or from nothing, to `version`."""

    version: int
    base: int | None
    offset: int
    """Bytes of it that are there."""


@dataclass(frozen=True)
class Piece:
    """Run: a piece of the way to a version."""

    version: int
    is_delta: bool
    num_bytes: int
    """Of the whole way."""
    offset: int
    data: bytes


@dataclass(frozen=True)
class Fetch:
    """Run: have these weights come to the host of an engine, while it samples on, and say so."""

    version: int
    infos: list[dict]
    """What to pull; see extras/swarm/pull.py."""


@dataclass(frozen=True)
class Fetched:
    """Host: the weights that were to come for an engine are there, and can be loaded at once."""

    version: int


TO_ENGINE = (Tickets, Connect, Fetch, Update, Abort, Suspend, Idle)
FROM_ENGINE = (Ready, Fetched, Updated, Probed, Finished)
TO_HOST = (Welcome, Refused, JoinAt, JoinAgain, Beat, Leave, Piece)
FROM_HOST = (Join, Beat, Leave, Pull)


# As bytes


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


def printable(text: str) -> str:
    """Return a stranger's text for one line of a terminal."""
    return "".join(c if c.isprintable() else "?" for c in text)


def code_digest() -> str:
    """One digest of all source files of a run."""
    code = [item for item in fingerprint(Config()).items() if item[0].endswith(".py")]
    return hashlib.sha256(str(code).encode()).hexdigest()


def user_code_digest(texts: Iterable[str]) -> str:
    """One digest of the files of user code: their places and contents. Raises OSError for one that is missing."""
    code = sorted((place, path.read_bytes()) for place, path in files(texts).items())
    return hashlib.sha256(str(code).encode()).hexdigest()


def read_key(path: str) -> tuple[bytes, bytes, bytes]:
    """The run's public key and the hosts' public and secret, from a key file. Raises ValueError if it is none."""
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
