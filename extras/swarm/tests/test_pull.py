"""Snapshots that a host pulls: exact, whole or as a delta, and nothing else is taken for them."""

import struct

import numpy as np
import pytest
import torch
import zstandard

import extras.swarm.pull
from asyncrl.weights.transport import ParameterSpec
from extras.swarm.delta import BLOCK_WORDS, apply_delta, digest_of, encode_delta
from extras.swarm.pull import KEPT, MAX_READ, PullTransport
from extras.swarm.puller import Puller
from extras.swarm.wire import Piece

SPECS = [ParameterSpec("a", torch.bfloat16, (300, 7)), ParameterSpec("b", torch.float32, (5,))]


def payload(seed, num_words=50_000):
    return (
        np.random.default_rng(seed).integers(0, 1 << 16, num_words, dtype=np.uint16).view(np.uint8)
    )


def changed(base, share, seed):
    words, rng = base.view(np.uint16).copy(), np.random.default_rng(seed)
    where = rng.random(len(words)) < share
    words[where] ^= rng.integers(1, 1 << 16, where.sum(), dtype=np.uint16)
    return words.view(np.uint8)


def test_there_is_no_delta_where_it_would_be_larger_than_the_snapshot():
    assert encode_delta(3, payload(0), changed(payload(0), 1.0, 1)) is None


def test_a_snapshot_of_several_blocks_has_the_gaps_of_each_counted_from_its_start():
    base = np.zeros(2 * (BLOCK_WORDS + 5), np.uint8)
    new = base.copy()
    new.view(np.uint16)[[0, BLOCK_WORDS - 1, BLOCK_WORDS, BLOCK_WORDS + 4]] = [1, 2, 3, 4]
    apply_delta(encode_delta(0, base, new), 0, base)
    assert (base == new).all()


def test_a_delta_that_is_cut_or_for_another_base_or_size_is_refused():
    base = payload(0)
    delta = encode_delta(3, base, changed(base, 0.01, 1))
    for num_bytes in (0, 10, len(delta) - 3):
        with pytest.raises(ValueError, match="a broken delta"):
            apply_delta(delta[:num_bytes], 3, base.copy())
    with pytest.raises(ValueError, match="a delta for version 3, 50000 words; here is 4, 50000"):
        apply_delta(delta, 4, base.copy())
    with pytest.raises(ValueError, match="here is 3, 10"):
        apply_delta(delta, 3, payload(0, 10))


def test_garbage_in_a_delta_is_a_value_error_or_found_by_the_digest():
    base, rng = payload(0, 5_000), np.random.default_rng(2)
    new = changed(base, 0.05, 1)
    delta, num_refused = encode_delta(0, base, new), 0
    for _ in range(300):
        garbled, copy = bytearray(delta), base.copy()
        where = rng.integers(len(delta))
        garbled[where] ^= rng.integers(1, 256)
        try:
            apply_delta(garbled, 0, copy)
        except ValueError:
            num_refused += 1
        else:
            assert digest_of(copy) != digest_of(new)
    assert num_refused > 10


def test_a_delta_that_would_unpack_to_more_than_a_block_is_refused_before_memory_is_taken():
    base, packed = payload(0), zstandard.ZstdCompressor().compress(bytes(1 << 20))
    for num_changed in (0, 5, 1 << 31):
        delta = (
            encode_delta(0, base, base)[:16] + struct.pack("<II", num_changed, len(packed)) + packed
        )
        with pytest.raises(ValueError, match="changes of 50000 words have 1048576 bytes"):
            apply_delta(delta, 0, base.copy())


# The trainer's end


def parameters(value):
    return [(spec.name, torch.full(spec.shape, float(value))) for spec in SPECS]


def staged(*versions):
    """A transport with these versions, of which each has one value in five hundred of its own."""
    transport = PullTransport(SPECS)
    for version in versions:
        transport.stage(
            version, [("a", torch.ones(300, 7)), ("b", torch.full((5,), float(version)))]
        )
    return transport


def test_whoever_has_a_kept_version_gets_a_delta_which_is_made_once_and_all_others_the_whole():
    transport = staged(0, 1, 2)
    is_delta, stream = transport.open(2, 1)
    assert is_delta and len(stream) < transport.num_bytes / 10 and transport.open(2, 1)[1] is stream
    assert [transport.open(2, base)[0] for base in (None, 2, 7)] == [False] * 3


def is_left(transport, version):
    try:
        return not transport.open(version, None)[0]
    except ValueError as error:
        assert f"no snapshot of version {version} is left" in str(error)
        return False


def test_old_snapshots_go_unless_a_worker_reads_them_or_they_are_announced():
    transport = PullTransport(SPECS)
    first = transport.stage(0, parameters(0))
    transport.acquire(first)
    transport.announce(transport.stage(1, parameters(1)))
    for version in range(2, 7):
        transport.stage(version, parameters(version))
    assert [v for v in range(7) if is_left(transport, v)] == [0, 1, 4, 5, 6]
    transport.release(first)
    transport.announce(transport.stage(7, parameters(7)))
    transport.stage(8, parameters(8))
    assert [v for v in range(9) if is_left(transport, v)] == [6, 7, 8]


def test_many_slow_hosts_cannot_make_the_trainer_keep_all_versions():
    transport = PullTransport(SPECS)
    for version in range(20):
        transport.acquire(transport.stage(version, parameters(version)))
    assert [v for v in range(20) if is_left(transport, v)] == [
        *range(MAX_READ),
        *range(20 - KEPT, 20),
    ], "the oldest are nearest to their end"


def test_the_trainer_stages_on_while_a_delta_of_what_it_forgets_is_encoded(monkeypatch):
    transport = staged(0, 1)

    def encode_meanwhile(*of):
        for version in range(2, 8):
            transport.stage(version, parameters(version))
        return encode_delta(*of)

    monkeypatch.setattr(extras.swarm.pull, "encode_delta", encode_meanwhile)
    is_delta, stream = transport.open(1, 0)
    assert is_delta and len(stream) > 0
    assert not is_left(transport, 1) and not transport._ways


def test_a_delta_that_has_begun_goes_on_when_its_base_is_forgotten():
    transport = staged(0, 1)
    begun = transport.open(1, 0)
    for version in range(2, 4):
        transport.stage(version, parameters(version))
    assert not is_left(transport, 0) and transport.open(1, 0) == begun


# The far end


class Host:
    """A puller, and the run's side that answers it in pieces."""

    def __init__(self, transport, piece_bytes=1 << 20):
        self.transport, self.piece_bytes, self.asked, self.num_bytes = transport, piece_bytes, [], 0
        self.puller = Puller(transport.init_info(), self.asked.append)

    def answer(self):
        """The piece that was asked for last."""
        pull = self.asked[-1]
        is_delta, stream = self.transport.open(pull.version, pull.base)
        data = bytes(memoryview(stream)[pull.offset : pull.offset + self.piece_bytes])
        self.num_bytes += len(data)
        return Piece(pull.version, is_delta, len(stream), pull.offset, data)

    def take_all(self):
        while not self.puller.take(self.answer()):
            pass

    def pull(self, staged):
        self.puller.want(staged.messages[0])
        self.take_all()


def is_same(puller, parameters):
    return all(
        name == sent_name and torch.equal(tensor, sent.to(tensor.dtype))
        for (name, tensor), (sent_name, sent) in zip(puller.parameters(), parameters, strict=True)
    )


@pytest.mark.parametrize("seed", range(8))
def test_a_host_that_skips_versions_has_the_very_weights_of_those_it_takes(seed):
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    dtypes = [torch.bfloat16, torch.float32, torch.float16]
    shapes = [tuple(map(int, rng.integers(1, 40, rng.integers(1, 4)))) for _ in range(5)]
    specs = [ParameterSpec(f"p{i}", dtypes[i % 3], shape) for i, shape in enumerate(shapes)]
    values = [(spec.name, torch.randn(spec.shape, generator=generator)) for spec in specs]
    transport = PullTransport(specs)
    host = Host(transport, piece_bytes=int(rng.integers(1, 3000)))
    for version in range(12):
        share = rng.choice([0.0, 0.01, 0.3, 1.0])  # of values that this step changes
        values = [
            (n, torch.where(torch.rand(v.shape, generator=generator) < share, v + 0.1, v))
            for n, v in values
        ]
        staged = transport.stage(version, values)
        if rng.random() < 0.5:
            host.pull(staged)
            assert host.puller.here.version == version and is_same(host.puller, values)


def two_versions(transport, other=0.0):
    """Versions 0 and 1 with few values changed, random so that a delta is some hundred bytes."""
    a = torch.randn(300, 7, generator=torch.Generator().manual_seed(0)) + other
    first = transport.stage(0, [("a", a), ("b", torch.zeros(5))])
    a = torch.where(torch.rand(300, 7, generator=torch.Generator().manual_seed(1)) < 0.05, a + 1, a)
    return first, transport.stage(1, [("a", a), ("b", torch.zeros(5))]), a


@pytest.fixture
def begun():
    """A host that has version 0, and wants version 1."""
    host = Host(PullTransport(SPECS))
    first, second, host.values = two_versions(host.transport)
    host.pull(first)
    host.puller.want(second.messages[0])
    return host


@pytest.mark.parametrize("is_delta", [True, False])
def test_a_pull_that_is_cut_after_any_piece_goes_on_where_it_was(is_delta):
    transport = PullTransport(SPECS)
    first, second, a = two_versions(transport)
    num_bytes = len(transport.open(1, 0 if is_delta else None)[1])
    for num_before in range(-(-num_bytes // 60)):
        host = Host(transport)
        if is_delta:
            host.pull(first)
        host.piece_bytes, host.num_bytes = 60, 0
        host.puller.want(second.messages[0])
        for _ in range(num_before):
            assert not host.puller.take(host.answer())
        host.asked.clear()  # what was asked for last was lost
        host.puller.want(second.messages[0]) if num_before % 2 else host.puller.resume()
        assert host.asked[-1].offset == 60 * num_before
        host.take_all()
        assert host.num_bytes == num_bytes and is_same(
            host.puller, [("a", a), ("b", torch.zeros(5))]
        )


def test_a_whole_copy_in_place_of_the_rest_of_a_delta_begins_at_its_start(begun):
    begun.piece_bytes = 60
    begun.puller.take(begun.answer())
    begun.transport, new = PullTransport(SPECS), [("a", begun.values), ("b", torch.zeros(5))]
    begun.transport.stage(1, new)
    begun.puller.resume()
    assert not begun.puller.take(begun.answer()) and begun.asked[-1].offset == 0
    begun.take_all()
    assert begun.puller.here.version == 1 and is_same(begun.puller, new)


def test_where_the_base_is_another_than_the_runs_the_whole_is_taken():
    host = Host(PullTransport(SPECS))
    first, _, _ = two_versions(host.transport, other=5.0)
    host.pull(first)
    here = [(name, tensor.clone()) for name, tensor in host.puller.parameters()]
    host.transport = PullTransport(SPECS)
    _, second, a = two_versions(host.transport)
    host.puller.want(second.messages[0])
    wrong = host.answer()
    assert not host.puller.take(wrong)
    assert host.puller.here.version == 0 and is_same(host.puller, here), (
        "what is here stays meanwhile"
    )
    assert not host.puller.take(wrong), "nor does it count when it comes twice"
    host.take_all()
    assert [pull.base for pull in host.asked] == [None, 0, None]
    assert is_same(host.puller, [("a", a), ("b", torch.zeros(5))])


WHOLE = PullTransport(SPECS).num_bytes


@pytest.mark.parametrize(
    ("is_delta", "num_bytes", "offset", "data"),
    [
        (False, WHOLE + 64, 0, b"x"),
        (True, WHOLE, 0, b"x"),
        (True, -1, 0, b"x"),
        (True, 10, 0, b"x" * 11),
        (True, 10, -1, b"x"),
        (True, 10, 0, b""),
    ],
)
def test_a_piece_that_no_snapshot_has_is_refused(begun, is_delta, num_bytes, offset, data):
    with pytest.raises(
        ValueError,
        match=f"a piece of {len(data)} bytes at {offset} of a .* of {num_bytes}; .* {WHOLE}",
    ):
        begun.puller.take(Piece(1, is_delta, num_bytes, offset, data))
    begun.take_all()
    assert begun.puller.here.version == 1


def test_pieces_that_come_twice_or_late_or_for_what_was_given_up_change_nothing():
    host = Host(PullTransport(SPECS), piece_bytes=1000)
    first, second, _ = two_versions(host.transport)
    host.puller.want(first.messages[0])
    late = host.answer()
    assert not host.puller.take(late) and not host.puller.take(late)
    host.take_all()
    assert len(host.asked) == -(-WHOLE // 1000) and not host.puller.take(late)
    host.puller.want(second.messages[0])
    assert not host.puller.take(late) and host.puller.wanted == second.messages[0]
    host.puller.give_up()
    host.puller.resume()
    assert not host.puller.take(host.answer()) and host.puller.here.version == 0
    assert host.puller.wanted is None


def test_a_whole_copy_that_is_not_what_was_announced_is_refused_and_the_old_one_stays(begun):
    with pytest.raises(ValueError, match="version 1 arrived broken"):
        begun.puller.take(Piece(1, False, WHOLE, 0, bytes(WHOLE)))
    assert begun.puller.here.version == 0 and begun.puller.parameters()[0][1].any()
