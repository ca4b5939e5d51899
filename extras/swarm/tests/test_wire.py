"""Messages as bytes: what is sent comes back, and nothing else is let in."""

import contextlib
import json

import msgspec
import numpy as np
import pytest

from asyncrl.messages import (
    ActivityReport,
    Finished,
    Probed,
    SampledTokens,
    Tickets,
    Update,
    Updated,
)
from asyncrl.records import Ticket, Trajectory
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


def trajectory(**changed):
    fields = {
        "ticket_id": 1, "group_id": 2, "member": 3, "tokens": np.arange(5), "loss_mask": np.arange(5) > 2,
        "behavior_logprobs": np.zeros(5, np.float32), "policy_versions": np.full(5, 7, np.int32), "reward": 1.0,
        "finish_reason": "stop", "failure": "", "num_turns": 1, "started_at": 0.5, "ended_at": 1.5, "worker": 0,
        "turns": ((0.5, 1.0, 1.5),), "reward_parts": {"right": 0.5, "short": 0.5},
    }  # fmt: skip
    return Trajectory(**{**fields, **changed})


def sent(message, received=FROM_ENGINE):
    codec = Codec(received)
    return codec.decode(*codec.encode(message))


def test_a_trajectory_comes_back_with_the_dtypes_and_shapes_of_its_arrays():
    found = sent(Finished([trajectory()], ActivityReport(((5, "decoding", ""),), 9)))
    for name, value in vars(trajectory()).items():
        other = getattr(found.trajectories[0], name)
        if isinstance(value, np.ndarray):
            assert other.dtype == value.dtype and (other == value).all()
        else:
            assert other == value
    assert found.activity == ActivityReport(((5, "decoding", ""),), 9)


@pytest.mark.parametrize(
    ("message", "received"),
    [
        (Tickets([Ticket(1, 2, 3, 1, 0, (4, 5), "a", None, 6, 0)]), TO_ENGINE),
        (Update(3, [{"version": 3, "digest": "d", "num_bytes": 9}], ((1, 2),)), TO_ENGINE),
        (Piece(3, True, 9, 0, b"abc"), TO_HOST),
        (Join(1, "c", "cpu", "h", 2.0), FROM_HOST),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_sent_comes_back_as_it_was(message, received):
    assert sent(message, received) == message


def test_a_numpy_scalar_of_a_reward_is_sent_as_a_number():
    found = sent(Finished([trajectory(reward=np.float64(0.25))], None))
    assert found.trajectories[0].reward == 0.25


@pytest.mark.parametrize(
    ("kind", "fields", "why"),
    [
        (b"Tickets", b"\x80", "a message of kind b'Tickets', not one of"),
        (b"Finished", b"\xc0", "a broken Finished"),
        (b"Updated", CODEC.encode(Updated(0, 0.1, SampledTokens(), None))[1][:-3], "truncated"),
        *(
            (b"Probed", pack({"version": 1, "logprobs": [array]}), "Probed|as many bytes")
            for array in (["<f4", [1 << 40], b"1"], ["O", [1], b"1"], ["<f4", [0, 2**63], b""])
        ),
        (b"Probed", pack({"version": 1, "logprobs": [["|b1", [1], b"\x07"]]}), "a broken Probed"),
        (b"Probed", pack({"version": "x", "logprobs": []}), "a broken Probed"),
    ],
)
def test_what_may_not_come_or_is_broken_is_refused_in_a_line(kind, fields, why):
    with pytest.raises(ValueError, match=why):
        CODEC.decode(kind, fields)


def test_random_bytes_are_refused_and_nothing_worse():
    rng, codec = np.random.default_rng(0), CODEC
    good = codec.encode(Probed(1, (np.zeros(3, np.float32),)))[1]
    for _ in range(2000):
        garbled = bytearray(good)
        for _ in range(rng.integers(1, 4)):
            garbled[rng.integers(len(garbled))] = rng.integers(256)
        with contextlib.suppress(ValueError):
            codec.decode(b"Probed", bytes(garbled[: rng.integers(1, len(garbled) + 1)]))


def test_a_key_file_that_is_none_is_told_in_a_line(tmp_path):
    broken = {"run": "x"}, {"run": "x", "machine": "y", "machine_secret": "z"}, [], {"run": 1}
    for path, keys in zip(map(tmp_path.joinpath, "abcd"), broken, strict=True):
        path.write_text(json.dumps(keys))
    for path in (tmp_path / "none", *map(tmp_path.joinpath, "abcd")):
        with pytest.raises(ValueError, match=r"cannot be read .* copy runs/NAME/swarm\.key"):
            read_key(str(path))
