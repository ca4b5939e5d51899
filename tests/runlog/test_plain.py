"""Records as bytes: what is written is read again, dtypes and all, and nothing else is."""

import json
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
    arrays = [
        np.arange(6).reshape(2, 3),
        np.zeros(0, np.float32),
        np.arange(3, dtype=np.uint8),
        np.array([np.nan, -1e-45], np.float32),
    ]
    written = Outer([Inner({3: 4}, array) for array in arrays], (1, "a"), {"x"})
    read = decode(Outer, encode(written))
    assert (read.pair, read.names) == ((1, "a"), {"x"})
    for inner, array in zip(read.inners, arrays, strict=True):
        assert inner.counts == {3: 4}
        assert (inner.tokens.dtype, inner.tokens.shape) == (array.dtype, array.shape)
        assert inner.tokens.tobytes() == array.tobytes()


def test_half_a_character_is_written_as_in_json_and_what_stands_beside_it_as_ever():
    row = {"id": 7, "text": "half \ud83d of 😀"}
    answer = json.dumps(row, ensure_ascii=False)
    inner = Inner({3: 4}, np.arange(3))
    read = decode(Outer, encode(Outer([inner], (1, answer), {"\udcff", "α"})))
    assert json.loads(read.pair[1]) == row
    assert read.names == {"\\udcff", "α"}
    assert read.inners[0].counts == {3: 4} and read.inners[0].tokens.tolist() == [0, 1, 2]


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
