"""Weights that a host pulls, by the socket or by files: exact, whole or as a delta, and nothing else is taken."""

import contextlib
import errno
import math
import random
import struct
import threading
from collections import Counter
from dataclasses import replace

import fsspec
import numpy as np
import pytest
import torch
import zstandard
from fsspec.implementations.memory import MemoryFileSystem
from programs import wait_until

from asyncrl.weights.transport import ParameterSpec
from extras.swarm.delta import apply_delta, encode_delta
from extras.swarm.pull import KEPT, MAX_READ, PullTransport
from extras.swarm.puller import Puller
from extras.swarm.snapshots import SnapshotWriter, cheapest_way
from extras.swarm.wire import Piece

DTYPES = [torch.bfloat16, torch.float32, torch.float16]
ANCHOR_EVERY, KEPT_ANCHORS = 3, 2
VERSIONS = range(7)


class Trainer:
    """A trainer's end: it stages versions of which each changes a share of the values."""

    def __init__(self, url=None, seed=0):
        self.url, self.version, self.draw = url, -1, random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        shapes = [[self.draw.randint(1, 19) for _ in range(3)] for _ in range(5)]
        self.specs = [
            ParameterSpec(f"p{i}", DTYPES[i % 3], shape) for i, shape in enumerate(shapes)
        ]
        self.values = [(spec.name, self.random(spec.shape)) for spec in self.specs]
        self.begin()

    def begin(self):
        writer = None if self.url is None else SnapshotWriter(str(self.url))
        self.transport = PullTransport(self.specs, writer)

    def random(self, shape):
        return torch.rand(shape, generator=self.generator)

    def stage(self):
        """Stage the next version. Returns its update info."""
        self.version += 1
        share = self.draw.choice([0.0, 0.01, 0.3, 1.0])
        self.values = [
            (name, torch.where(self.random(value.shape) < share, value + 0.1, value))
            for name, value in self.values
        ]
        (self.info,) = self.transport.stage(self.version, self.values).messages
        return self.info


def delta_of(num_bytes):
    """A delta from version 3, which is zeros."""
    base = np.zeros(num_bytes, np.uint8)
    new = base.copy()
    new[::40] = 7
    return encode_delta(3, base, new)


def test_a_delta_that_is_cut_would_unpack_to_more_or_changes_what_is_not_there_is_refused():
    delta, bomb = delta_of(10_000), zstandard.ZstdCompressor().compress(bytes(1 << 20))
    bombs = [delta[:16] + struct.pack("<II", num, len(bomb)) + bomb for num in (0, 5, 1 << 31)]
    cut = [delta[:size] for size in (0, 10, len(delta) - 3)]
    for broken in (*cut, *bombs, delta[:16] + delta_of(20_000)[16:]):
        with pytest.raises(ValueError, match="a broken delta"):
            apply_delta(broken, 3, np.zeros(10_000, np.uint8))
    noise = np.random.default_rng(0).integers(256, size=10_000, dtype=np.uint8)
    assert encode_delta(3, np.zeros(10_000, np.uint8), noise) is None, "it is smaller whole"


@pytest.mark.parametrize("seed", range(8))
def test_a_snapshot_is_there_while_it_is_new_announced_or_read_and_its_memory_is_used_again(seed):
    """Slow hosts keep the oldest few. What a host reads stays as it was when its snapshot has gone."""
    trainer = Trainer(seed=seed)
    draw, transport = trainer.draw, trainer.transport
    left, readers, announced, held, addresses = [], Counter(), None, [], set()
    for version in range(60):
        trainer.stage()
        old = [v for v in left[: 1 - KEPT] if v != announced]
        gone = set(old) - set([v for v in old if readers[v]][:MAX_READ])
        left = [v for v in (*left, version) if v not in gone]
        assert [v for v in range(-1, version + 1) if transport.is_kept(v)] == left
        addresses.add(transport.open(version, None)[1].ctypes.data)
        with pytest.raises(ValueError, match=r"^no snapshot of version -1 is left$"):
            transport.open(-1, None)
        target, base = draw.choice(left), draw.randrange(version + 1)
        stream = transport.open(target, base)[1]
        assert transport.open(target, base)[1] is stream, "it is made once"
        held = [*held, (memoryview(stream), bytes(stream))][-draw.randint(1, 3) :]
        assert all(bytes(part) == before for part, before in held)
        del stream
        if draw.random() < 0.5:
            readers[target] += 1
            transport.acquire(transport.staged(target))
        readable = [v for v in left if readers[v]]
        if readable and draw.random() < 0.4:
            done = draw.choice(readable)
            readers[done] -= 1
            transport.release(transport.staged(done))
        if draw.random() < 0.5:
            announced = version
            transport.announce(transport.staged(version))
    assert len(addresses) < 15


class Network(Trainer):
    """A trainer that is also started again, a host that pulls from it, and all that may lie between them."""

    def __init__(self, seed, folder, is_clean):
        self.folder, self.is_clean = folder, is_clean
        self.asked, self.pieces, self.weights = [], [], {}
        super().__init__(folder, seed)
        self.piece_bytes = self.draw.randint(20, 3000)
        self.puller = Puller(self.transport.init_info(), self.asked.append, lambda: None)
        for _ in range(2):
            self.stage()

    def stage(self):
        super().stage()
        self.weights[self.info["digest"]] = self.values

    def want(self):
        """What is wanted already goes on where it was."""
        goes_on, asked = self.is_clean and self.info == self.puller.wanted, self.asked[-1:]
        self.puller.want(self.info)
        assert not goes_on or self.asked[-1:] == asked

    def restart(self):
        """The run is another, with the same newest weights, and others before them. Files of others stay."""
        self.transport.close()
        if self.folder is not None:
            (self.folder / f"00000007-{'a' * 16}.snapshot").write_bytes(b"of a run that was killed")
            (self.folder / "notes.txt").write_bytes(b"mine")
        self.begin()
        assert self.folder is None or names(self.folder) == ["notes.txt"]
        older_values = [(name, self.random(value.shape)) for name, value in self.values]
        self.transport.stage(self.version - 1, older_values)
        (self.info,) = self.transport.stage(self.version, self.values).messages
        if self.is_clean:
            self.puller.want(self.info)

    def deliver(self):
        """The piece that was asked for last, unless it is lost or its version is gone."""
        if self.asked and self.draw.random() < 0.9:
            pull = self.asked[-1]
            if self.transport.is_kept(pull.version):
                is_delta, stream = self.transport.open(pull.version, pull.base)
                data = bytes(memoryview(stream)[pull.offset :][: self.piece_bytes])
                self.pieces.append(Piece(pull.version, is_delta, len(stream), pull.offset, data))
                self.take(self.pieces[-1])

    def deliver_again(self):
        if self.pieces:
            self.take(self.draw.choice(self.pieces))

    def garble(self):
        """A piece comes in a form that no snapshot has, or with other bytes."""
        if not self.pieces:
            return
        piece = self.pieces[-1]
        for change in ({"num_bytes": 10**12}, {"num_bytes": -1}, {"offset": -1}, {"data": b""}):
            with pytest.raises(ValueError, match="a piece of "):
                self.puller.take(replace(piece, **change))
        if not self.is_clean:
            data = bytearray(piece.data)
            data[self.draw.randrange(len(data))] ^= self.draw.randint(1, 255)
            changes = [{"data": bytes(data)}, {"is_delta": not piece.is_delta}, {"offset": 0}]
            self.take(replace(piece, **self.draw.choice(changes)))

    def spoil_file(self):
        """A file that was written whole is removed, cut or garbled."""
        paths = [] if self.folder is None or self.is_clean else list(self.folder.glob("*.snapshot"))
        if paths:
            path = self.draw.choice(paths)
            with contextlib.suppress(FileNotFoundError):  # the writer removes old ones
                content = path.read_bytes()
                path.write_bytes(self.draw.choice([content[:-5], content[:-20] + bytes(20)]))
                if self.draw.random() < 0.3:
                    path.unlink()

    def take(self, piece):
        try:
            is_whole = self.puller.take(piece)
        except ValueError:
            assert not self.is_clean
        else:
            assert not is_whole or self.puller.wanted is None

    def walk(self, num_events):
        chances = {self.stage: 5, self.want: 10, self.puller.resume: 5, self.puller.give_up: 1}
        chances |= {self.restart: 2, self.deliver: 60, self.deliver_again: 5, self.garble: 2}
        chances |= {self.spoil_file: 5, self.puller.collect: 5}
        for event in self.draw.choices([*chances], chances.values(), k=num_events):
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
        if self.is_clean and self.folder is not None:
            assert len(names(self.folder)) <= (KEPT_ANCHORS + 1) * (ANCHOR_EVERY + 1) + 2

    def comes(self):
        """Let some pieces come. Returns whether the host has the newest version."""
        for _ in range(100):
            self.deliver()
            self.puller.resume()
        self.puller.collect()
        return self.puller.wanted is None


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("seed", range(16))
def test_whatever_comes_over_the_network_a_host_has_the_very_weights_of_a_version(
    tmp_path, monkeypatch, seed
):
    """Pieces are lost, come twice, late or broken; so do files; versions are skipped, given up and forgotten."""
    monkeypatch.setattr("extras.swarm.delta.BLOCK_WORDS", 200)
    monkeypatch.setattr("extras.swarm.snapshots.ANCHOR_EVERY", ANCHOR_EVERY)
    monkeypatch.setattr("extras.swarm.snapshots.KEPT_ANCHORS", KEPT_ANCHORS)
    monkeypatch.setattr("extras.swarm.snapshots.WAIT_S", 0.05)
    monkeypatch.setattr("extras.swarm.snapshots.POLL_S", 0.01)
    folder = tmp_path if seed % 4 < 2 else None
    network = Network(seed, folder, is_clean=seed % 2 == 0)
    network.walk(400)
    is_clean, network.is_clean = network.is_clean, False
    network.want()  # what was garbled may be found out only now
    wait_until(network.comes)
    network.check()
    assert network.puller.here.digest == network.info["digest"]
    if is_clean and folder is not None:
        # else it would pull by the socket while it reads an older version
        wait_until(lambda: network.puller.collect() or network.puller._reading is None)
        monkeypatch.setattr("extras.swarm.snapshots.WAIT_S", 60.0)
        network.asked.clear()
        network.stage()
        network.want()
        wait_until(network.puller.collect)
        network.check()
        assert not network.asked, "it came by files alone"
    network.transport.close()
    assert not is_clean or folder is None or set(names(folder)) <= {"notes.txt"}


class Disk(MemoryFileSystem):
    """A file system that may be full, or stand still until it is told to go on."""

    protocol = "disk"
    store, pseudo_dirs = {}, [""]
    is_full = False
    goes = threading.Event()

    def _open(self, path, mode="rb", **kwargs):
        assert self.goes.wait(60)
        if self.is_full and mode == "wb":
            raise OSError(errno.ENOSPC, "No space left\non device")
        return super()._open(path, mode, **kwargs)


def test_a_slow_or_full_file_system_holds_no_step_and_weights_come_by_the_socket_meanwhile(capsys):
    fsspec.register_implementation("disk", Disk, clobber=True)
    Disk.goes.set()
    asked, woken = [], threading.Semaphore(0)
    trainer = Trainer("disk://run")
    puller = Puller(trainer.transport.init_info(), asked.append, woken.release)
    first = trainer.stage()
    wait_until(lambda: Disk.store)
    Disk.goes.clear()
    puller.want(first)
    puller.resume()
    assert asked == [], "the files are asked, and nobody waits for them"
    for _ in range(5):
        newer = trainer.stage()
    assert len(Disk.store) == 1
    puller.want(newer)
    assert [pull.version for pull in asked] == [5]
    Disk.goes.set()
    assert woken.acquire(timeout=20) and not puller.collect()
    assert puller.here is None and puller.wanted == newer, "what was read is wanted no more"
    puller.give_up()
    puller.want(newer)  # it may still be to be written
    assert woken.acquire(timeout=20) and puller.collect() and puller.here.version == 5
    assert len(Disk.store) < 6, "what there was no time for is skipped"
    puller.want({**first, "digest": newer["digest"]})
    assert woken.acquire(timeout=20), "nobody waits for what was skipped"
    assert not puller.collect() and asked[-1].version == 0
    line = capsys.readouterr().out
    assert line.startswith("weights of version 0 come by the socket: ValueError: version 0 is not")
    Disk.is_full = True
    wait_until(lambda: "snapshots" not in trainer.stage())
    wait_until(lambda: "snapshots" not in trainer.stage())
    (line,) = capsys.readouterr().out.splitlines()
    assert "cannot be written to disk://run (OSError: [Errno 28] No space left on device)" in line
    Disk.is_full = False
    wait_until(lambda: "snapshots" in trainer.stage())
    trainer.transport.close()
    assert not Disk.store


@pytest.mark.parametrize("seed", range(30))
def test_the_way_of_fewest_bytes_is_taken(seed):
    """By looking at all: a whole file of any version, or what is here, and all deltas after it."""
    draw = random.Random(seed)
    whole = [draw.choice([math.inf, 50, 90]) for _ in VERSIONS]
    deltas = [draw.choice([math.inf, 1, 20, 90]) for _ in VERSIONS]
    here = draw.choice([None, *VERSIONS])
    costs = [(0 if v == here else whole[v]) + sum(deltas[v + 1 :]) for v in VERSIONS]
    nodes = [f"{version}-{'0' * 16}" for version in VERSIONS]
    sizes = {f"{node}.snapshot": size for node, size in zip(nodes, whole, strict=True)}
    for v in VERSIONS[1:]:
        sizes[f"{nodes[v - 1]}_{nodes[v]}.snapshot"] = deltas[v]
    sizes = {name: size for name, size in sizes.items() if size < math.inf}
    files = cheapest_way(sizes, nodes[-1], None if here is None else nodes[here])
    assert (math.inf if files is None else sum(map(sizes.get, files))) == min(costs)
    ring = {f"{nodes[v]}_{nodes[1 - v]}.snapshot": 1 for v in (0, 1)}
    assert cheapest_way(ring, nodes[0], nodes[2]) is None, "no ring of names holds the search"
