"""Messages as bytes: what is sent comes back, and nothing else is let in."""

import json

import msgspec
import pytest

from asyncrl.messages import Finished, Tickets
from extras.swarm.wire import (
    FROM_ENGINE,
    FROM_HOST,
    TO_ENGINE,
    TO_HOST,
    Codec,
    Join,
    Piece,
    read_key,
)

pack = msgspec.msgpack.encode
CODEC = Codec(FROM_ENGINE)


@pytest.mark.parametrize(
    ("message", "received"),
    [
        (Finished([], None), FROM_ENGINE),
        (Tickets([]), TO_ENGINE),
        (Piece(3, True, 9, 0, b"abc"), TO_HOST),
        (Join(1, "c", "cpu", "h", 2.0), FROM_HOST),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_message_is_let_in_as_it_was_and_only_from_its_side(message, received):
    kind, fields = CODEC.encode(message)
    assert Codec(received).decode(kind, fields) == message
    for tuples in {TO_ENGINE, FROM_ENGINE, TO_HOST, FROM_HOST} - {received}:
        with pytest.raises(ValueError, match=f"a message of kind b'{kind.decode()}', not one of"):
            Codec(tuples).decode(kind, fields)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        (pack({"version": 1, "logprobs": [["<f4", [1 << 40], b"1"]]}), "as many bytes"),
        (pack({"version": 1, "logprobs": [["O", [1], b"1"]]}), "as many bytes"),
        (pack({"version": 1, "logprobs": [["<f4", [1.0], b"1234"]]}), "as many bytes"),
        (pack({"version": 1, "logprobs": [["<f4", [0, 2**63], b""]]}), "a broken Probed"),
        (pack({"version": 1, "logprobs": [["|b1", [1], b"\x07"]]}), "a broken Probed"),
        (pack({"version": "x", "logprobs": []}), "a broken Probed"),
        (b"\xc0", "a broken Probed"),
    ],
)
def test_a_broken_message_is_refused_in_a_line(fields, why):
    with pytest.raises(ValueError, match=why):
        CODEC.decode(b"Probed", fields)


@pytest.mark.parametrize(
    "keys",
    [None, {"run": "x"}, {"run": "x", "machine": "y", "machine_secret": "z"}, [], {"run": 1}],
)
def test_a_key_file_that_is_none_is_told_in_a_line(tmp_path, keys):
    if keys is not None:
        (tmp_path / "key").write_text(json.dumps(keys))
    with pytest.raises(ValueError, match=r"cannot be read .* copy runs/NAME/swarm\.key"):
        read_key(str(tmp_path / "key"))
