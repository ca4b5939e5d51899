"""Snapshots as files: exact along every way, and when a file system fails, hosts pull by the socket."""

import errno
import random
import threading
from pathlib import Path

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from hosts import wait_until

import extras.swarm.snapshots
from asyncrl.weights.transport import ParameterSpec
from extras.swarm.delta import digest_of
from extras.swarm.pull import PullTransport
from extras.swarm.puller import Puller
from extras.swarm.snapshots import NAME, SnapshotWriter, cheapest_way, read_snapshot

SPECS = [ParameterSpec("a", torch.bfloat16, (301, 7)), ParameterSpec("b", torch.float32, (5,))]


class Trainer:
    """A run's side that stages versions of which each changes a few values, and waits for its files."""

    def __init__(self, url):
        self.writer = SnapshotWriter(str(url))
        self.transport = PullTransport(SPECS, self.writer)
        self.num_bytes = self.transport.num_bytes
        self.random, self.version = torch.Generator().manual_seed(0), -1
        self.values = torch.randn(301, 7, generator=self.random)

    def stage(self, share=0.01):
        self.version += 1
        where = torch.rand(301, 7, generator=self.random) < share
        self.values = torch.where(where, self.values + 1, self.values)
        parameters = [("a", self.values), ("b", torch.ones(5))]
        return self.transport.stage(self.version, parameters).messages[0]

    def write(self, share=0.01):
        """Stage a version. Returns its update info when its file is there, or has failed."""
        info = self.stage(share)
        wait_until(lambda: self.is_written() or self.writer.is_failing)
        return info

    def is_written(self):
        return self.writer._written is not None and self.writer._written.version == self.version

    def snapshot(self):
        return self.transport._kept[self.version]


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "run"


@pytest.fixture(autouse=True)
def anchors_every_3(monkeypatch):
    monkeypatch.setattr(extras.swarm.snapshots, "ANCHOR_EVERY", 3)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 1.0])
def test_a_host_reads_the_very_bytes_from_any_version_that_it_has(folder, share):
    trainer = Trainer(folder)
    had = [None]
    for _ in range(14):
        info = trainer.write(share)
        for base in had:
            snapshot = read_snapshot(info, base, trainer.num_bytes)
            assert digest_of(snapshot.payload) == info["digest"]
            assert snapshot.version == trainer.version
        had.append(trainer.snapshot())
    for base in had[1:]:  # and none was written into
        assert digest_of(base.payload) == base.digest


def test_files_older_than_the_last_two_anchors_are_removed_and_all_but_those_of_others_at_the_end(
    folder,
):
    folder.mkdir()
    (folder / f"00000007-{'a' * 16}.snapshot").write_bytes(b"of an earlier life of the run")
    (folder / "notes.txt").write_bytes(b"mine")
    trainer = Trainer(folder)
    assert names(folder) == ["notes.txt"]
    for _ in range(11):
        info = trainer.write()
    trainer.version -= 1
    assert trainer.stage(share=0.0) == info, "a version that is staged twice is written once"
    wait_until(lambda: len(names(folder)) == 7)
    matches = [NAME.fullmatch(name) for name in names(folder)[:-1]]
    assert [(match[1] and int(match[1][:8]), int(match[2][:8])) for match in matches] == [
        (None, 6), (6, 7), (7, 8), (8, 9), (None, 9), (9, 10)
    ]  # fmt: skip
    trainer.transport.close()
    assert names(folder) == ["notes.txt"]


def node(version):
    return f"{version:08d}-{'0' * 16}"


def delta(base, version):
    return f"{node(base)}_{node(version)}.snapshot"


def cheapest_bytes(sizes, wanted, here):
    """By looking at all: of a file from here, and those after it, or of a whole one; None if there is no way."""
    if wanted == here:
        return 0
    costs = [sizes[f"{node(wanted)}.snapshot"]] if f"{node(wanted)}.snapshot" in sizes else []
    for base in range(wanted):
        before = cheapest_bytes(sizes, base, here)
        if delta(base, wanted) in sizes and before is not None:
            costs.append(before + sizes[delta(base, wanted)])
    return min(costs, default=None)


@pytest.mark.parametrize("seed", range(30))
def test_the_way_of_fewest_bytes_is_taken(seed):
    draw = random.Random(seed)
    sizes = {f"{node(v)}.snapshot": draw.randint(50, 99) for v in range(7) if draw.random() < 0.4}
    sizes |= {delta(v - 1, v): draw.choice([1, 20, 90]) for v in range(1, 7) if draw.random() < 0.8}
    here = draw.choice([None, *range(7)])
    start = None if here is None else node(here)
    files = cheapest_way(sizes, node(6), start)
    num_bytes = cheapest_bytes(sizes, 6, here)
    assert (files is None) == (num_bytes is None)
    if files is not None:
        assert sum(map(sizes.get, files)) == num_bytes
    ring = {delta(5, 6): 10, delta(6, 5): 10}
    assert cheapest_way(ring, node(6), node(4)) is None, "no ring of names holds the search"


def test_a_host_waits_for_a_file_that_is_still_to_be_written(folder, monkeypatch):
    trainer = Trainer(folder)
    trainer.write()
    writer, trainer.transport.writer = trainer.writer, None
    info = {**trainer.stage(), "snapshots": writer.url}
    threading.Timer(0.7, writer.write, [trainer.snapshot()]).start()
    assert digest_of(read_snapshot(info, None, trainer.num_bytes).payload) == info["digest"]
    for version, wait_s in ((0, 600.0), (2, 0.1)):  # nobody waits for one that was skipped
        monkeypatch.setattr(extras.swarm.snapshots, "WAIT_S", wait_s)
        with pytest.raises(ValueError, match=f"version {version} is not in"):
            read_snapshot({**info, "version": version}, None, trainer.num_bytes)


class Host:
    """A puller, which is woken from another thread."""

    def __init__(self, trainer):
        self.asked, self.woken = [], threading.Semaphore(0)
        self.puller = Puller(trainer.transport.init_info(), self.asked.append, self.woken.release)

    def want(self, info):
        """Whether the version came by files."""
        self.puller.want(info)
        assert self.woken.acquire(timeout=60)
        return self.puller.collect()


def cut(path):
    path.write_bytes(path.read_bytes()[:-5])


def garble(path):
    path.write_bytes(path.read_bytes()[:-20] + bytes(20))


@pytest.mark.parametrize("spoil", [Path.unlink, cut, garble])
@pytest.mark.parametrize("is_delta", [True, False])
def test_where_a_file_is_missing_or_broken_the_host_says_so_and_pulls_by_the_socket(
    folder, spoil, is_delta, capsys, monkeypatch
):
    monkeypatch.setattr(extras.swarm.snapshots, "WAIT_S", 0.0)
    trainer = Trainer(folder)
    host, info = Host(trainer), trainer.write()
    if is_delta:
        assert host.want(info) and not host.asked and host.puller.wanted is None
        assert torch.equal(dict(host.puller.parameters())["a"], trainer.values.bfloat16())
        info = trainer.write()
    spoil(folder / names(folder)[-1])
    assert not host.want(info)
    (pull,), here = host.asked, host.puller.here
    assert (pull.version, pull.base, pull.offset) == ((1, 0, 0) if is_delta else (0, None, 0))
    assert (here and here.version) == pull.base, "what was here is whole still"
    (line,) = capsys.readouterr().out.splitlines()
    assert f"version {pull.version} come by the socket" in line


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


@pytest.fixture
def disk():
    fsspec.register_implementation("disk", Disk, clobber=True)
    Disk.store.clear()
    Disk.is_full = False
    Disk.goes.set()
    yield Disk
    Disk.goes.set()


def test_with_a_full_disk_the_trainer_goes_on_and_hosts_are_sent_to_it_again_when_it_has_room(
    disk, capsys
):
    trainer = Trainer("disk://run")
    assert "snapshots" in trainer.write() and capsys.readouterr().out == ""
    disk.is_full = True
    trainer.write()
    assert ["snapshots" in trainer.write() for _ in range(3)] == [False] * 3
    (line,) = capsys.readouterr().out.splitlines()
    why = "cannot be written to disk://run (OSError: [Errno 28] No space left on device)"
    assert f"version 1 {why}" in line
    disk.is_full = False
    trainer.write()
    wait_until(lambda: not trainer.writer.is_failing)
    assert Host(trainer).want(trainer.write())
    trainer.transport.close()
    assert not disk.store


@pytest.mark.parametrize(
    "url", ["no-such-protocol://run", "/dev/null/run", "/dev/null", "disk://full"]
)
def test_a_url_that_cannot_be_written_to_is_refused_in_one_line(disk, url):
    disk.is_full = True
    line = f"^--swarm.snapshots {url}: is no folder .*; give one .*$"
    with pytest.raises(ValueError, match=line) as error:
        SnapshotWriter(url)
    assert "\n" not in str(error.value)


def test_a_slow_file_system_holds_no_step_and_newer_weights_come_by_the_socket_meanwhile(disk):
    trainer = Trainer("disk://run")
    host, info = Host(trainer), trainer.write()
    disk.goes.clear()
    host.puller.want(info)
    host.puller.resume()
    assert host.asked == [], "the files are asked, and nobody waits for them"
    for _ in range(5):
        newer = trainer.stage()
    assert len(disk.store) == 1
    host.puller.want(newer)
    assert [pull.version for pull in host.asked] == [5]
    disk.goes.set()
    assert host.woken.acquire(timeout=60) and not host.puller.collect()
    assert host.puller.here is None, "what was read is wanted no more"
    assert host.puller.wanted == newer
    host.puller.give_up()
    wait_until(trainer.is_written)
    assert not trainer.writer.is_failing
    assert len(disk.store) in (2, 3), "what there was no time for is skipped: three or four of five"
    assert host.want(newer) and host.puller.here.version == 5
