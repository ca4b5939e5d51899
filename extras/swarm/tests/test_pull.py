"""Snapshots that a host pulls: exact, whole or as a delta, and nothing else is taken for them."""

import contextlib
import struct
from dataclasses import replace

import numpy as np
import pytest
import torch
import zstandard
from hosts import wait_until
from staging import Trainer

from asyncrl.weights.transport import ParameterSpec
from extras.swarm.delta import apply_delta, encode_delta
from extras.swarm.pull import KEPT, MAX_READ
from extras.swarm.puller import Puller
from extras.swarm.wire import Piece


def payload(seed, num_words=50_000):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 1 << 16, num_words, dtype=np.uint16).view(np.uint8)


def test_a_delta_that_is_cut_garbled_or_for_another_base_or_size_is_refused_and_nothing_worse():
    base, rng = payload(0, 5_000), np.random.default_rng(2)
    new = base.copy()
    new[rng.integers(0, 10_000, 250)] ^= 7
    delta = encode_delta(3, base, new)
    for num_bytes in (0, 10, len(delta) - 3):
        with pytest.raises(ValueError, match="a broken delta"):
            apply_delta(delta[:num_bytes], 3, base.copy())
    for version, size in ((4, 5_000), (3, 10)):
        line = f"a delta for version 3, 5000 words; here is {version}, {size}"
        with pytest.raises(ValueError, match=line):
            apply_delta(delta, version, payload(0, size))
    for _ in range(300):
        garbled = bytearray(delta)
        garbled[rng.integers(len(garbled))] ^= rng.integers(1, 256)
        with contextlib.suppress(ValueError):
            apply_delta(garbled, 3, base.copy())


@pytest.mark.parametrize("num_changed", [0, 5, 1 << 31])
def test_a_delta_that_would_unpack_to_more_than_a_block_is_refused_before_memory_is_taken(
    num_changed,
):
    base, packed = payload(0), zstandard.ZstdCompressor().compress(bytes(1 << 20))
    header = encode_delta(0, base, base)[:16] + struct.pack("<II", num_changed, len(packed))
    with pytest.raises(ValueError, match="changes of 50000 words have 1048576 bytes"):
        apply_delta(header + packed, 0, base.copy())


# The trainer's end


def left(trainer):
    """Versions of which a snapshot is left."""
    versions = []
    for version in range(trainer.version + 1):
        try:
            is_delta, stream = trainer.transport.open(version, None)
        except ValueError as error:
            assert str(error) == f"no snapshot of version {version} is left"
        else:
            assert not is_delta and len(stream) == trainer.transport.num_bytes
            versions.append(version)
    return versions


def test_old_snapshots_go_unless_a_worker_reads_them_or_they_are_announced():
    """Whoever has one that is left gets a delta, made once, and all others get the whole."""
    trainer = Trainer()
    transport = trainer.transport
    for version in range(7):
        trainer.stage()
        if version == 0:
            transport.acquire(transport.staged(0))
        if version == 1:
            transport.announce(transport.staged(1))
    assert left(trainer) == [0, 1, 4, 5, 6]
    is_delta, stream = transport.open(6, 5)
    assert is_delta and len(stream) < transport.num_bytes / 10
    assert transport.open(6, 5)[1] is stream
    assert [transport.open(6, base)[0] for base in (None, 6, 3)] == [False] * 3
    transport.release(transport.staged(0))
    trainer.stage()
    transport.announce(transport.staged(7))
    trainer.stage()
    assert left(trainer) == [6, 7, 8]
    assert transport.open(6, 5)[1] is stream, "it goes on when its base is forgotten"
    trainer.stage()
    assert not transport._answers, "and goes with its version"


def test_many_slow_hosts_cannot_make_the_trainer_keep_all_versions():
    """The oldest are nearest to their end."""
    trainer = Trainer()
    for version in range(20):
        trainer.stage()
        trainer.transport.acquire(trainer.transport.staged(version))
    assert left(trainer) == [*range(MAX_READ), *range(20 - KEPT, 20)]


def test_memory_is_used_again_only_when_nobody_refers_to_a_snapshot_any_more():
    trainer, addresses, read = Trainer(), set(), []
    for version in range(40):
        trainer.stage()
        _, stream = trainer.transport.open(version, None)
        addresses.add(stream.ctypes.data)
        if version in (3, 17):  # it is still read, as bytes or as words
            part = memoryview(stream) if version == 3 else stream.view("<u2")
            read.append((part, bytes(part)))
    assert len(addresses) <= KEPT + 1 + len(read)
    for part, before in read:
        assert bytes(part) == before


# The far end


class Network(Trainer):
    """A trainer that is also started again, a host that pulls from it, and all that may lie between them."""

    def __init__(self, seed, folder, is_clean):
        self.rng, self.folder, self.is_clean = np.random.default_rng(seed), folder, is_clean
        self.piece_bytes = int(self.rng.integers(20, 3000))
        self.asked, self.pieces, self.weights = [], [], {}
        dtypes = [torch.bfloat16, torch.float32, torch.float16]
        shapes = [
            tuple(map(int, self.rng.integers(1, 20, self.rng.integers(1, 4)))) for _ in range(5)
        ]
        specs = [ParameterSpec(f"p{i}", dtypes[i % 3], shape) for i, shape in enumerate(shapes)]
        super().__init__(folder, specs, seed)
        self.puller = Puller(self.transport.init_info(), self.asked.append, lambda: None)
        self.stage()

    def stage(self, share=None):
        super().stage(self.rng.choice([0.0, 0.01, 0.3, 1.0]) if share is None else share)
        self.weights[self.info["digest"]] = self.values
        return self.info

    def want(self):
        """What is wanted already goes on where it was."""
        goes_on, asked = self.is_clean and self.info == self.puller.wanted, self.asked[-1:]
        self.puller.want(self.info)
        assert not goes_on or self.asked[-1:] == asked

    def restart(self):
        """The run is another, with the same newest weights, and others before them."""
        self.transport.close()
        self.begin()
        older_values = [(name, self.random(value.shape)) for name, value in self.values]
        self.transport.stage(self.version - 1, older_values)
        (self.info,) = self.transport.stage(self.version, self.values).messages

    def deliver(self):
        """The piece that was asked for last, unless it is lost or its version is gone."""
        if self.asked and self.rng.random() < 0.9:
            pull = self.asked[-1]
            if pull.version in self.transport._kept:
                self.pieces.append(self.answer(pull, self.piece_bytes))
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

    def spoil_file(self):
        """A file that was written whole is removed, cut or garbled."""
        paths = [] if self.folder is None or self.is_clean else list(self.folder.glob("*.snapshot"))
        if paths:
            path, is_cut = self.rng.choice(paths), self.rng.random() < 0.5
            with contextlib.suppress(FileNotFoundError):  # the writer removes old ones
                content = path.read_bytes()
                path.write_bytes(content[:-5] if is_cut else content[:-20] + bytes(20))
                if self.rng.random() < 0.3:
                    path.unlink()

    def take(self, piece):
        try:
            is_whole = self.puller.take(piece)
        except ValueError:
            assert not self.is_clean
        else:
            assert not is_whole or self.puller.wanted is None

    def walk(self, num_events):
        events = [self.stage, self.want, self.puller.resume, self.puller.give_up, self.restart]
        events += [self.deliver, self.deliver_again, self.garble, self.spoil_file]
        events += [self.puller.collect]
        chances = np.array([0.05, 0.1, 0.05, 0.01, 0.02, 0.6, 0.05, 0.02, 0.05, 0.05])
        for event in self.rng.choice(events, num_events, p=chances):
            event()
            self.check()

    def check(self):
        """What the host has is a version of the weights to the bit."""
        if self.puller.here is not None:
            values = self.weights[self.puller.here.digest]
            for (name, tensor), (sent_name, sent) in zip(
                self.puller.parameters(), values, strict=True
            ):
                assert name == sent_name and torch.equal(tensor, sent.to(tensor.dtype))

    def comes(self):
        """Let some pieces come. Returns whether the host has the newest version."""
        for _ in range(100):
            self.deliver()
            self.puller.resume()
        self.puller.collect()
        return self.puller.wanted is None


@pytest.mark.parametrize("seed", range(16))
def test_whatever_comes_over_the_network_a_host_has_the_very_weights_of_a_version(
    tmp_path, monkeypatch, seed
):
    """Pieces are lost, come twice, late or broken; so do files; versions are skipped, given up and forgotten."""
    monkeypatch.setattr("extras.swarm.delta.BLOCK_WORDS", 200)
    monkeypatch.setattr("extras.swarm.snapshots.ANCHOR_EVERY", 3)
    monkeypatch.setattr("extras.swarm.snapshots.WAIT_S", 0.05)
    monkeypatch.setattr("extras.swarm.snapshots.POLL_S", 0.01)
    folder = tmp_path if seed % 4 < 2 else None
    network = Network(seed, folder, is_clean=seed % 2 == 0)
    network.walk(400)
    is_clean, network.is_clean = (
        network.is_clean,
        False,
    )  # what was garbled may be found out only now
    network.want()
    wait_until(network.comes)
    network.check()
    assert network.puller.here.digest == network.info["digest"]
    if is_clean and folder is not None:
        # else it would pull by the socket while it reads an older version
        wait_until(lambda: network.puller.collect() or network.puller._reading is None)
        network.asked.clear()
        network.write()
        network.want()
        wait_until(network.puller.collect)
        network.check()
        assert not network.asked, "it came by files alone"
    network.transport.close()


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
def test_a_piece_that_no_snapshot_has_is_refused(is_delta, excess, offset, data):
    whole = Trainer().transport
    puller = Puller(whole.init_info(), lambda pull: None)
    num_bytes = whole.num_bytes + excess
    line = f"a piece of {len(data)} bytes at {offset} of a .* of {num_bytes}; .* {whole.num_bytes}"
    with pytest.raises(ValueError, match=line):
        puller.take(Piece(1, is_delta, num_bytes, offset, data))
