"""Records as bytes: what is written is read again, dtypes and all, and nothing else is."""

from dataclasses import dataclass, field

import numpy as np
import pytest

from asyncrl.runlog.plain import decode, encode


@dataclass
class Inner:
    counts: dict[int, int]
    tokens: np.ndarray


@dataclass
class Outer:
    inners: list[Inner]
    pair: tuple[int, str] | None = None
    names: set[str] = field(default_factory=set)


def test_dataclasses_in_one_another_come_back_with_their_arrays_and_keys_that_are_numbers():
    written = Outer(
        [Inner({3: 4}, np.arange(6).reshape(2, 3)), Inner({}, np.zeros(0, np.float32))],
        (1, "a"),
        {"x"},
    )
    found = decode(Outer, encode(written))
    assert found.pair == (1, "a") and found.names == {"x"} and found.inners[0].counts == {3: 4}
    for one, other in zip(found.inners, written.inners, strict=True):
        assert one.tokens.dtype == other.tokens.dtype and np.array_equal(one.tokens, other.tokens)


@pytest.mark.parametrize("kind", [dict[str, int], list[tuple[int, bytes]], int])
def test_plain_types_are_read_as_well(kind):
    value = {"dict": {"a": 1}, "list": [(1, b"b")], "int": 2**63 - 1}[getattr(kind, "__name__", "")]
    assert decode(kind, encode(value)) == value


def test_every_bit_of_a_float_is_kept():
    values = np.array([np.nextafter(1, 2), np.pi, 5e-324, -0.0, np.inf])
    assert np.array(decode(list[float], encode(values.tolist()))).tobytes() == values.tobytes()
    narrow = np.array([np.nan, -1e-45, 3.4e38], np.float32)
    assert decode(np.ndarray, encode(narrow)).tobytes() == narrow.tobytes()


@pytest.mark.parametrize(
    "value", [np.zeros(2, np.complex64), np.array([None]), object(), {1: lambda: 0}]
)
def test_what_could_not_be_read_again_is_not_written(value):
    with pytest.raises(TypeError, match="is not written"):
        encode(value)


@pytest.mark.parametrize(
    "data", [b"", b"\xc1", encode({"inners": 3}), encode(Outer([]))[:-2], b"\x91" * 5000]
)
def test_bytes_of_something_else_are_refused_in_a_line(data):
    with pytest.raises(ValueError, match=r"a broken Outer: \w"):
        decode(Outer, data)
