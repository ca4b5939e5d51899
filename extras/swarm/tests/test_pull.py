"""Weights that a host pulls, by the socket or by files: exact, whole or as a delta, and nothing else is taken."""

import errno
import itertools
import math
import random
import struct
import threading
from dataclasses import replace

import fsspec
import numpy as np
import pytest
import torch
import zstandard
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem
from programs import wait_until

from asyncrl.weights.transport import ParameterSpec, Staged
from extras.swarm.delta import Snapshot, apply_delta, encode_delta
from extras.swarm.pull import KEPT, MAX_READ, PullTransport
from extras.swarm.puller import Puller
from extras.swarm.snapshots import Folder, SnapshotWriter, find_cheapest_way, read_snapshot
from extras.swarm.wire import Piece

DTYPES = [torch.bfloat16, torch.float32, torch.float16]
ANCHOR_EVERY, KEPT_ANCHORS = 3, 2


class Trainer:
    """A trainer's end: it stages versions of which each changes a share of the values."""

    def __init__(self, url=None, seed=0):
        self.url, self.version, self.draw = url, -1, random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        shapes = [[self.draw.randint(1, 19) for _ in range(3)] for _ in range(5)]
        self.specs = [
            ParameterSpec(f"p{i}", DTYPES[i % 3], shape) for i, shape in enumerate(shapes)
        ]
        self.values = self.new_values()
        self.payloads = {}
        """Bytes of all versions, by digest."""
        self.begin()

    def begin(self):
        writer = None if self.url is None else SnapshotWriter(str(self.url))
        self.transport = PullTransport(self.specs, writer)

    def new_values(self):
        return [(spec.name, self.random(spec.shape)) for spec in self.specs]

    def random(self, shape):
        return torch.rand(shape, generator=self.generator)

    def stage(self):
        """Stage the next version. Returns its update info."""
        share = self.draw.choice([0.0, 0.01, 0.3, 1.0])
        changed = [
            (name, torch.where(self.random(value.shape) < share, value + 0.1, value))
            for name, value in self.values
        ]
        return self.put(self.version + 1, changed)

    def put(self, version, values):
        """A version has each value in the dtype that is sent, from a multiple of 64 bytes, and zeros between them."""
        self.version, self.values = version, values
        (self.info,) = self.transport.stage(version, values).messages
        payload = b""
        for spec, (_, value) in zip(self.specs, values, strict=True):
            payload += value.to(spec.dtype).flatten().view(torch.uint8).numpy().tobytes()
            payload += bytes(-len(payload) % 64)
        self.payloads[self.info["digest"]] = payload
        return self.info


def delta_of(num_bytes):
    """A delta from version 3, which is zeros."""
    base = np.zeros(num_bytes, np.uint8)
    new = base.copy()
    new[::40] = 7
    return encode_delta(3, base, new)


def test_a_delta_that_is_cut_would_unpack_to_more_or_is_for_another_base_is_refused():
    delta, bomb = delta_of(10_000), zstandard.ZstdCompressor().compress(bytes(6 * 5_001))
    numbers = (0, 5, 5_001, 1 << 31)
    bombs = [delta[:16] + struct.pack("<II", num, len(bomb)) + bomb for num in numbers]
    cut = [delta[:size] for size in (0, 10, len(delta) - 3)]
    broken = [(part, 3, 10_000) for part in (*cut, *bombs, delta[:16] + delta_of(20_000)[16:])]
    for part, version, num_bytes in (*broken, (delta, 2, 10_000), (delta, 3, 9_998)):
        with pytest.raises(ValueError, match=r"^a broken delta: |^a delta for version 3, 5000 "):
            apply_delta(part, version, np.zeros(num_bytes, np.uint8))


class Network(Trainer):
    """A trainer that is also started again, a host that pulls from it, and all that may lie between them."""

    def __init__(self, seed, is_clean):
        self.is_clean = is_clean
        self.asked, self.pieces, self.held = [], [], []
        super().__init__(seed=seed)
        self.puller = Puller(self.transport.init_info(), self.asked.append)
        for _ in range(2):
            self.stage()

    def begin(self):
        super().begin()
        self.kept, self.announced, self.reading = set(), None, []
        """Versions that must be there, and those that hosts read."""
        self.addresses = set()

    def put(self, version, values):
        """A snapshot is there while it is new, announced or read. Slow hosts keep the oldest few."""
        super().put(version, values)
        self.kept.add(version)
        old = [v for v in sorted(self.kept)[:-KEPT] if v != self.announced]
        self.kept -= set(old) - set([v for v in old if v in self.reading][:MAX_READ])
        assert {v for v in range(-1, 500) if self.transport.is_kept(v)} == self.kept
        self.addresses.add(self.transport.open(version, None)[1].ctypes.data)
        assert len(self.addresses) < 15, "memory is not used again"

    def announce(self):
        self.announced = self.version
        self.transport.make_readable(Staged(self.version, []))

    def begin_reading(self):
        self.reading.append(self.draw.choice(sorted(self.kept)))
        self.transport.acquire(Staged(self.reading[-1], []))

    def end_reading(self):
        self.draw.shuffle(self.reading)
        if self.reading:
            self.transport.release(Staged(self.reading.pop(), []))

    def want(self):
        """What is wanted already goes on where it was."""
        is_new, last_asked = self.info != self.puller.wanted, self.asked[-1:]
        self.puller.want(self.info)
        assert is_new or self.asked[-1:] == last_asked or not self.is_clean

    def restart(self):
        """The newest versions are made again, often by another run: all are others, or those before the last."""
        if self.draw.random() < 0.5:
            self.transport.close()
            self.begin()
        last = self.draw.choice([self.values, self.new_values()])
        self.put(self.version - 1, self.new_values())
        self.put(self.version + 1, last)
        self.pieces.clear()
        self.puller.want(self.info)

    def deliver(self):
        """What was asked for last comes, unless it is lost or its version is gone. The host asks for what is next."""
        if not self.asked or self.draw.random() < 0.1:
            return
        pull, num_asked = self.asked[-1], len(self.asked)
        if pull.version not in self.kept:
            with pytest.raises(ValueError, match="no snapshot of version "):
                self.transport.open(pull.version, pull.base)
            return
        is_delta, stream = self.transport.open(pull.version, pull.base)
        (info,) = self.transport.staged(pull.version).messages
        assert is_delta or bytes(stream) == self.payloads[info["digest"]]
        assert pull.base is None or self.transport.open(pull.version, pull.base)[1] is stream
        self.held = [*self.held, (memoryview(stream), bytes(stream))][-3:]
        data = bytes(stream[pull.offset :][: math.ceil(len(stream) / self.draw.randint(1, 6))])
        self.pieces.append(Piece(pull.version, is_delta, len(stream), pull.offset, data))
        self.take(self.pieces[-1])
        has_asked = len(self.asked) > num_asked
        assert has_asked or self.puller.wanted is None or not self.is_clean

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

    def take(self, piece):
        try:
            self.puller.take(piece)
        except ValueError:
            assert not self.is_clean

    def walk(self, num_events, num_restarts):
        chances = {self.stage: 8, self.want: 10, self.puller.resume: 5, self.puller.give_up: 1}
        chances |= {self.restart: num_restarts, self.deliver: 60, self.deliver_again: 5}
        chances |= {self.garble: 2, self.announce: 3, self.begin_reading: 7, self.end_reading: 5}
        for event in self.draw.choices([*chances], chances.values(), k=num_events):
            event()
            self.check()

    def check(self):
        """What the host has is a version of the weights to the bit. What is read stays when its snapshot has gone."""
        here = self.puller.here
        assert here is None or bytes(here.payload) == self.payloads[here.digest]
        assert all(bytes(stream) == before for stream, before in self.held)


@pytest.mark.parametrize("seed", range(16))
def test_whatever_comes_over_the_network_a_host_has_the_very_weights_of_a_version(
    monkeypatch, seed
):
    """Pieces are lost, come twice, late or broken; versions are skipped, given up and forgotten."""
    monkeypatch.setattr("extras.swarm.delta.BLOCK_WORDS", 200)
    network = Network(seed, is_clean=seed % 2 == 0)
    network.walk(500, num_restarts=4 * (seed % 4))
    network.is_clean = False
    network.want()  # what was garbled may be found out only now
    for _ in range(100):
        network.deliver()
        network.puller.resume()
    network.check()
    assert network.puller.here.digest == network.info["digest"]


def test_as_many_bases_are_kept_as_asked_a_version_is_no_base_of_itself_and_none_outlives_the_run():
    transport = PullTransport([ParameterSpec("w", torch.float32, (64,))], num_kept=5)
    for version in range(7):
        transport.stage(version, [("w", torch.full((64,), float(version)))])
    assert [version for version in range(9) if transport.is_kept(version)] == [2, 3, 4, 5, 6]
    is_delta, stream = transport.open(6, 6)
    assert not is_delta and len(stream) == 256
    transport.close()
    assert not any(map(transport.is_kept, range(9)))


class Disk(MemoryFileSystem):
    """A file system that may be full, or stand still until it is told to go on."""

    protocol = "disk"
    store, pseudo_dirs = {}, [""]
    goes = threading.Event()
    room, num_refused = math.inf, 0
    """Files for which there is room, and how many found none."""
    shows_unfinished = False
    """Whether a snapshot could be seen before it was whole."""

    def _open(self, path, mode="rb", **kwargs):
        assert self.goes.wait(60)
        if mode == "wb":
            if self.room < 1:
                Disk.num_refused += 1
                raise OSError(errno.ENOSPC, "No space left\non device")
            Disk.room -= 1
            Disk.shows_unfinished |= ".snapshot" in path
        return super()._open(path, mode, **kwargs)

    def ls(self, *arguments, **kwargs):
        listed = super().ls(*arguments, **kwargs)
        self.on_listing()
        return listed

    def on_listing(self):
        """What happens while a reader looks at what it was told."""


@pytest.fixture
def disk():
    """An empty file system, `disk://`."""
    fsspec.register_implementation("disk", Disk, clobber=True)
    Disk.store.clear()
    Disk.goes.set()
    Disk.room = math.inf
    return Disk()


class Files(Trainer):
    """The folder of a run: what its writer must leave there, and what is read from it."""

    def __init__(self, disk, seed):
        self.disk = disk
        for name in (f"00000007-{'a' * 16}.snapshot", "notes.txt"):
            self.put_file(name, b"of a run that was killed, or of nobody")
        super().__init__("disk://run", seed)
        self.snapshots, self.last_written, self.generations = [], None, []
        """Names of the files from each whole one until the next."""
        self.removed, self.is_spoiled = set(), False

    def put_file(self, name, content):
        self.disk.store[f"disk://run/{name}"] = MemoryFile(self.disk, name, content)

    def listed_names(self):
        return {path.rpartition("/")[2] for path in [*self.disk.store]} - {"notes.txt"}

    @property
    def expected_names(self):
        """Files that must be there, except the one that is nobody's."""
        return {*itertools.chain(*self.generations)} - self.removed

    def write(self):
        """The next version is written while a host looks for it, or there is no room for some of its files."""
        Disk.goes.clear()
        version, digest = self.stage()["version"], self.info["digest"]
        payload = np.frombuffer(self.payloads[digest], np.uint8)
        base, new = self.last_written, Snapshot(version, digest, payload)
        self.snapshots.append(new)
        delta = base and encode_delta(base.version, base.payload, payload)
        names = [] if delta is None else [f"{node_of(base)}_{node_of(new)}.snapshot"]
        if delta is None or len(self.generations[-1]) >= ANCHOR_EVERY:
            names.append(f"{node_of(new)}.snapshot")
        Disk.room = self.draw.choice([0, 1, 2, 2, 2])
        num_refused = Disk.num_refused + (Disk.room < len(names))
        for name in names[: Disk.room]:
            self.last_written = new
            if "_" in name:
                self.generations[-1].append(name)
            else:
                self.generations = [*self.generations, [name]][-KEPT_ANCHORS:]
        if self.last_written is new:
            self.disk.on_listing = Disk.goes.set
            self.read(new, base)
        Disk.goes.set()
        self.put(version, self.values)  # a late version may come twice
        wait_until(lambda: self.listed_names() == self.expected_names)
        wait_until(lambda: Disk.num_refused == num_refused)

    def spoil(self):
        """Somebody removes a file, cuts it, or puts another in its place."""
        name, other = self.draw.choices(sorted(self.expected_names), k=2)
        content = self.disk.store[f"disk://run/{other}"].getvalue()
        self.put_file(name, content[: self.draw.choice([-5, None])])
        if self.draw.random() < 0.5:
            self.disk.rm_file(f"disk://run/{name}")
            self.removed.add(name)
        self.is_spoiled = True

    def read(self, snapshot, base):
        info = {"version": snapshot.version, "digest": snapshot.digest, "snapshots": self.url}
        copy = read_snapshot(info, base, len(snapshot.payload))
        assert (copy.version, copy.digest) == (snapshot.version, snapshot.digest)
        assert np.array_equal(copy.payload, snapshot.payload)

    def read_again(self):
        """What can be read is read, by the fewest bytes."""
        sizes = Folder(self.url).sizes()
        for snapshot in self.snapshots[-6:]:
            base = self.draw.choice([None, *self.snapshots[-6:]])
            nodes = node_of(snapshot), base and node_of(base)
            least, files = least_bytes(sizes, *nodes), find_cheapest_way(sizes, *nodes)
            assert least == (math.inf if files is None else sum(map(sizes.get, files)))
            try:
                self.read(snapshot, base)
            except (ValueError, OSError, zstandard.ZstdError):
                assert files is None or self.is_spoiled


def node_of(snapshot):
    return f"{snapshot.version:08d}-{snapshot.digest[:16]}"


def least_bytes(sizes, node, here):
    """Fewest bytes of files that lead to a snapshot: from what is here, or from nothing."""
    ways = [0] if node == here else []
    for name, size in sizes.items():
        start, _, end = name.removesuffix(".snapshot").rpartition("_")
        if end == node:
            ways.append(size + (least_bytes(sizes, start, here) if start else 0))
    return min(ways, default=math.inf)


@pytest.mark.parametrize("seed", range(16))
def test_files_lead_to_each_version_that_was_written_until_two_whole_ones_came_after_it(
    disk, monkeypatch, seed
):
    """They are as many as they must be. Some walks have files that others spoil or remove."""
    monkeypatch.setattr("extras.swarm.snapshots.ANCHOR_EVERY", ANCHOR_EVERY)
    monkeypatch.setattr("extras.swarm.snapshots.KEPT_ANCHORS", KEPT_ANCHORS)
    monkeypatch.setattr("extras.swarm.snapshots.POLL_S", 0.01)
    files = Files(disk, seed)
    for number in range(25):
        monkeypatch.setattr("extras.swarm.snapshots.WAIT_S", 60)
        files.write()
        if number % 4 < seed % 2 and files.expected_names:
            files.spoil()
        monkeypatch.setattr("extras.swarm.snapshots.WAIT_S", -1)
        files.read_again()
    files.transport.close()
    assert disk.cat_file("disk://run/notes.txt")
    assert not files.listed_names() and not Disk.shows_unfinished
    ring = {f"{n}-{'0' * 16}_{1 - n}-{'0' * 16}.snapshot": 1 for n in (0, 1)}
    assert find_cheapest_way(ring, f"0-{'0' * 16}", None) is None, (
        "no ring of names holds the search"
    )


def test_a_slow_or_full_file_system_holds_no_step_and_weights_come_by_the_socket_meanwhile(
    disk, capsys
):
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
    another = {**first, "digest": newer["digest"]}
    puller.want(another)
    assert [pull.version for pull in asked] == [0]
    Disk.goes.set()
    assert woken.acquire(timeout=20) and not puller.collect()
    assert puller.here is None, "what was read is wanted no more"
    puller.want(newer)  # it may still be to be written
    assert woken.acquire(timeout=20) and puller.collect() and puller.here.version == 5
    assert len(Disk.store) < 6, "what there was no time for is skipped"
    puller.want(another)
    assert woken.acquire(timeout=20), "nobody waits for what is not there"
    assert not puller.collect() and len(asked) == 2
    line = capsys.readouterr().out
    assert line.startswith("weights of version 0 come by the socket: ValueError: version 0 is not")
    Disk.room = 0
    for _ in range(2):
        wait_until(lambda: "snapshots" not in trainer.stage())
    (line,) = capsys.readouterr().out.splitlines()
    assert "cannot be written to disk://run (OSError: [Errno 28] No space left on device)" in line
    Disk.room = math.inf
    wait_until(lambda: "snapshots" in trainer.stage())
    trainer.transport.close()
    assert not Disk.store
