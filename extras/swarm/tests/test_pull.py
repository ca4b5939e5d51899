"""Snapshots that a host pulls: exact, whole or as a delta, and nothing else is taken for them."""

import struct
from dataclasses import replace

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
WHOLE = PullTransport(SPECS).num_bytes


def payload(seed, num_words=50_000):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 1 << 16, num_words, dtype=np.uint16).view(np.uint8)


def changed(base, share, seed):
    words, rng = base.view(np.uint16).copy(), np.random.default_rng(seed)
    where = rng.random(len(words)) < share
    words[where] ^= rng.integers(1, 1 << 16, where.sum(), dtype=np.uint16)
    return words.view(np.uint8)


def test_a_snapshot_of_several_blocks_has_the_gaps_of_each_counted_from_its_start():
    base = np.zeros(2 * (BLOCK_WORDS + 5), np.uint8)
    new = base.copy()
    new.view(np.uint16)[[0, BLOCK_WORDS - 1, BLOCK_WORDS, BLOCK_WORDS + 4]] = [1, 2, 3, 4]
    apply_delta(encode_delta(0, base, new), 0, base)
    assert (base == new).all()


def test_a_delta_that_is_cut_garbled_or_for_another_base_or_size_is_refused_or_found_by_the_digest():
    base, rng = payload(0, 5_000), np.random.default_rng(2)
    new = changed(base, 0.05, 1)
    delta = encode_delta(3, base, new)
    for num_bytes in (0, 10, len(delta) - 3):
        with pytest.raises(ValueError, match="a broken delta"):
            apply_delta(delta[:num_bytes], 3, base.copy())
    for version, size in ((4, 5_000), (3, 10)):
        line = f"a delta for version 3, 5000 words; here is {version}, {size}"
        with pytest.raises(ValueError, match=line):
            apply_delta(delta, version, payload(0, size))
    for _ in range(300):
        garbled, copy = bytearray(delta), base.copy()
        garbled[rng.integers(len(garbled))] ^= rng.integers(1, 256)
        try:
            apply_delta(garbled, 3, copy)
        except ValueError:
            continue
        assert digest_of(copy) != digest_of(new)


@pytest.mark.parametrize("num_changed", [0, 5, 1 << 31])
def test_a_delta_that_would_unpack_to_more_than_a_block_is_refused_before_memory_is_taken(
    num_changed,
):
    base, packed = payload(0), zstandard.ZstdCompressor().compress(bytes(1 << 20))
    header = encode_delta(0, base, base)[:16] + struct.pack("<II", num_changed, len(packed))
    with pytest.raises(ValueError, match="changes of 50000 words have 1048576 bytes"):
        apply_delta(header + packed, 0, base.copy())


# The trainer's end


def parameters(value):
    """Return weights of which one value in five hundred differs from version to version."""
    return [("a", torch.ones(300, 7)), ("b", torch.full((5,), float(value)))]


def left(transport):
    """Versions of which a snapshot is left."""
    versions = []
    for version in range(30):
        try:
            is_delta, stream = transport.open(version, None)
        except ValueError as error:
            assert str(error) == f"no snapshot of version {version} is left"
        else:
            assert not is_delta and len(stream) == WHOLE
            versions.append(version)
    return versions


def test_old_snapshots_go_unless_a_worker_reads_them_or_they_are_announced():
    """Whoever has one that is left gets a delta, made once, and all others get the whole."""
    transport = PullTransport(SPECS)
    first = transport.stage(0, parameters(0))
    transport.acquire(first)
    transport.announce(transport.stage(1, parameters(1)))
    for version in range(2, 7):
        transport.stage(version, parameters(version))
    assert left(transport) == [0, 1, 4, 5, 6]
    is_delta, stream = transport.open(6, 5)
    assert is_delta and len(stream) < WHOLE / 10 and transport.open(6, 5)[1] is stream
    assert [transport.open(6, base)[0] for base in (None, 6, 3)] == [False] * 3
    transport.release(first)
    transport.announce(transport.stage(7, parameters(7)))
    transport.stage(8, parameters(8))
    assert left(transport) == [6, 7, 8]
    assert transport.open(6, 5)[1] is stream, "it goes on when its base is forgotten"
    transport.stage(9, parameters(9))
    assert not transport._ways, "and goes with its version"


def test_a_host_gets_the_whole_where_a_delta_would_be_larger():
    transport = PullTransport([ParameterSpec("a", torch.bfloat16, (50_000,))])
    for version in range(2):
        bits = torch.randint(-(1 << 15), 1 << 15, (50_000,), dtype=torch.int16)
        transport.stage(version, [("a", bits.view(torch.bfloat16))])
    is_delta, stream = transport.open(1, 0)
    assert not is_delta and len(stream) == transport.num_bytes


def test_many_slow_hosts_cannot_make_the_trainer_keep_all_versions():
    """The oldest are nearest to their end."""
    transport = PullTransport(SPECS)
    for version in range(20):
        transport.acquire(transport.stage(version, parameters(version)))
    assert left(transport) == [*range(MAX_READ), *range(20 - KEPT, 20)]


def test_the_trainer_stages_on_while_a_delta_of_what_it_forgets_is_encoded(monkeypatch):
    transport = PullTransport(SPECS)
    for version in range(2):
        transport.stage(version, parameters(version))

    def encode_meanwhile(*arguments):
        for version in range(2, 8):
            transport.stage(version, parameters(version))
        return encode_delta(*arguments)

    monkeypatch.setattr(extras.swarm.pull, "encode_delta", encode_meanwhile)
    is_delta, stream = transport.open(1, 0)
    assert is_delta and len(stream) > 0
    assert 1 not in left(transport) and not transport._ways


# The far end


def answer(transport, pull, piece_bytes):
    """The piece that is asked for."""
    is_delta, stream = transport.open(pull.version, pull.base)
    data = bytes(memoryview(stream)[pull.offset : pull.offset + piece_bytes])
    return Piece(pull.version, is_delta, len(stream), pull.offset, data)


def is_same(puller, values):
    return all(
        name == sent_name and torch.equal(tensor, sent.to(tensor.dtype))
        for (name, tensor), (sent_name, sent) in zip(puller.parameters(), values, strict=True)
    )


class Network:
    """A run that stages versions, or is started again; a host that pulls them; and all that may lie between them."""

    def __init__(self, seed, is_clean):
        self.rng, self.generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
        self.is_clean, self.piece_bytes = is_clean, int(self.rng.integers(20, 3000))
        dtypes = [torch.bfloat16, torch.float32, torch.float16]
        shapes = [
            tuple(map(int, self.rng.integers(1, 20, self.rng.integers(1, 4)))) for _ in range(5)
        ]
        self.specs = [ParameterSpec(f"p{i}", dtypes[i % 3], s) for i, s in enumerate(shapes)]
        self.values = [(s.name, self.random(s.shape)) for s in self.specs]
        self.transport, self.version, self.weights = PullTransport(self.specs), -1, {}
        self.asked, self.pieces = [], []
        self.puller = Puller(self.transport.init_info(), self.asked.append)
        self.stage()

    def random(self, shape):
        return torch.randn(shape, generator=self.generator)

    def stage(self, share=None):
        """Publish a version in which some values are others."""
        self.version += 1
        share = self.rng.choice([0.0, 0.01, 0.3, 1.0]) if share is None else share
        self.values = [
            (name, torch.where(self.random(v.shape).abs() < 3 * share, v + 0.1, v))
            for name, v in self.values
        ]
        (self.info,) = self.transport.stage(self.version, self.values).messages
        self.weights[self.info["digest"]] = self.values

    def want(self):
        self.puller.want(self.info)

    def restart(self):
        """The run is another, with the same newest weights, and others before them."""
        self.transport = PullTransport(self.specs)
        older_values = [(name, self.random(v.shape)) for name, v in self.values]
        self.transport.stage(self.version - 1, older_values)
        self.transport.stage(self.version, self.values)

    def deliver(self):
        """The piece that was asked for last, unless it is lost or its version is gone."""
        if self.asked and self.rng.random() < 0.9:
            pull = self.asked[-1]
            if pull.version in self.transport._kept:
                self.pieces.append(answer(self.transport, pull, self.piece_bytes))
                self.take(self.pieces[-1])

    def deliver_again(self):
        if self.pieces:
            self.take(self.pieces[self.rng.integers(len(self.pieces))])

    def garble(self):
        if self.pieces and not self.is_clean:
            piece = self.pieces[-1]
            data = bytes(self.rng.integers(0, 256, len(piece.data), dtype=np.uint8))
            is_delta, offset = self.rng.random() < 0.5, piece.offset - self.rng.integers(3)
            change = [{"data": data}, {"is_delta": is_delta}, {"offset": int(offset)}]
            self.take(replace(piece, **self.rng.choice(change)))

    def take(self, piece):
        try:
            is_whole = self.puller.take(piece)
        except ValueError:
            assert not self.is_clean
        else:
            assert not is_whole or self.puller.wanted is None

    def walk(self, num_events):
        events = [self.stage, self.want, self.puller.resume, self.puller.give_up, self.restart]
        events += [self.deliver, self.deliver_again, self.garble]
        chances = np.array([0.05, 0.1, 0.05, 0.01, 0.02, 0.7, 0.05, 0.02])
        for event in self.rng.choice(events, num_events, p=chances):
            event()
            if self.puller.here is not None:
                assert is_same(self.puller, self.weights[self.puller.here.digest])


@pytest.mark.parametrize("seed", range(16))
def test_whatever_comes_over_the_network_a_host_has_the_very_weights_of_a_version(seed):
    """Pieces are lost, come twice, late or broken; versions are skipped, given up and forgotten."""
    network = Network(seed, is_clean=seed % 2 == 0)
    network.walk(400)
    network.is_clean = False  # what was garbled may be found out only now
    network.want()
    for _ in range(2000):
        if network.puller.wanted is None:
            break
        network.deliver()
        network.puller.resume()
    assert network.puller.here.digest == network.info["digest"]
    assert is_same(network.puller, network.values)


@pytest.fixture
def begun():
    """A host that has version 0, and wants version 1, of which one value in a hundred is another."""
    network = Network(0, is_clean=True)
    network.want()
    assert network.puller.take(answer(network.transport, network.asked[-1], 1 << 20))
    network.stage(share=0.01)
    network.want()
    return network


def test_a_pull_that_is_cut_after_any_piece_goes_on_where_it_was(begun):
    is_delta, stream = begun.transport.open(1, 0)
    assert is_delta
    num_pieces = -(-len(stream) // 60)
    for number in range(num_pieces):
        begun.asked.clear()  # what was asked for last was lost
        begun.want() if number % 2 else begun.puller.resume()
        (pull,) = begun.asked
        assert (pull.version, pull.base, pull.offset) == (1, 0, 60 * number)
        is_whole = begun.puller.take(answer(begun.transport, pull, 60))
        assert is_whole == (number == num_pieces - 1)


@pytest.mark.parametrize(
    ("is_delta", "excess", "offset", "data"),
    [
        (False, 64, 0, b"x"),
        (True, 0, 0, b"x"),
        (True, -(10**9), 0, b"x"),
        (True, -10, -1, b"x"),
        (True, -10, 0, b""),
        (False, 0, 1, bytes(10**6)),
    ],
)
def test_a_piece_that_no_snapshot_has_is_refused(begun, is_delta, excess, offset, data):
    whole = begun.transport.num_bytes
    num_bytes = whole + excess
    line = f"a piece of {len(data)} bytes at {offset} of a .* of {num_bytes}; .* {whole}"
    with pytest.raises(ValueError, match=line):
        begun.puller.take(Piece(1, is_delta, num_bytes, offset, data))
    assert begun.puller.take(answer(begun.transport, begun.asked[-1], whole))
