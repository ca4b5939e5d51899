"""Snapshots as files: which are kept, and what happens when a file system is slow or full.

That a host reads the very bytes from them, or else pulls by the socket, is in test_pull.py.
"""

import errno
import random
import threading

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hosts import wait_until
from staging import Trainer

import extras.swarm.snapshots
from extras.swarm.delta import digest_of
from extras.swarm.puller import Puller
from extras.swarm.snapshots import NAME, SnapshotWriter, cheapest_way, read_snapshot


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_files_older_than_the_last_two_anchors_are_removed_and_all_but_those_of_others_at_the_end(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(extras.swarm.snapshots, "ANCHOR_EVERY", 3)
    (tmp_path / f"00000007-{'a' * 16}.snapshot").write_bytes(b"of an earlier life of the run")
    (tmp_path / "notes.txt").write_bytes(b"mine")
    trainer = Trainer(tmp_path)
    assert names(tmp_path) == ["notes.txt"]
    for _ in range(11):
        info = trainer.write()
    trainer.version -= 1
    assert trainer.stage(share=0.0) == info, "a version that is staged twice is written once"
    wait_until(lambda: len(names(tmp_path)) == 7)
    matches = [NAME.fullmatch(name) for name in names(tmp_path)[:-1]]
    assert [(match[1] and int(match[1][:8]), int(match[2][:8])) for match in matches] == [
        (None, 6), (6, 7), (7, 8), (8, 9), (None, 9), (9, 10)
    ]  # fmt: skip
    trainer.transport.close()
    assert names(tmp_path) == ["notes.txt"]


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


def test_a_host_waits_for_a_file_that_is_still_to_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr(extras.swarm.snapshots, "POLL_S", 0.05)
    trainer = Trainer(tmp_path)
    trainer.write()
    writer, trainer.transport.writer = trainer.writer, None
    info = {**trainer.stage(), "snapshots": writer.url}
    threading.Timer(0.2, writer.write, [trainer.transport._kept[1]]).start()
    num_bytes = trainer.transport.num_bytes
    assert digest_of(read_snapshot(info, None, num_bytes).payload) == info["digest"]
    for version, wait_s in ((0, 600.0), (2, 0.1)):  # nobody waits for one that was skipped
        monkeypatch.setattr(extras.swarm.snapshots, "WAIT_S", wait_s)
        with pytest.raises(ValueError, match=f"version {version} is not in"):
            read_snapshot({**info, "version": version}, None, num_bytes)


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
    assert "snapshots" in trainer.write()
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


def test_a_slow_file_system_holds_no_step_and_newer_weights_come_by_the_socket_meanwhile(
    disk, capsys
):
    asked, woken = [], threading.Semaphore(0)
    trainer = Trainer("disk://run")
    puller = Puller(trainer.transport.init_info(), asked.append, woken.release)
    info = trainer.write()
    disk.goes.clear()
    puller.want(info)
    puller.resume()
    assert asked == [], "the files are asked, and nobody waits for them"
    for _ in range(5):
        newer = trainer.stage()
    assert len(disk.store) == 1
    puller.want(newer)
    assert [pull.version for pull in asked] == [5]
    disk.goes.set()
    assert woken.acquire(timeout=60) and not puller.collect()
    assert puller.here is None, "what was read is wanted no more"
    assert puller.wanted == newer
    puller.give_up()
    wait_until(lambda: trainer.is_written)
    assert not trainer.writer.is_failing
    assert len(disk.store) in (2, 3), "what there was no time for is skipped: three or four of five"
    puller.want(newer)
    assert woken.acquire(timeout=60) and puller.collect() and puller.here.version == 5
    del disk.store[min(disk.store)]
    puller.want(info)
    assert woken.acquire(timeout=60) and not puller.collect() and asked[-1].version == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("weights of version 0 come by the socket: ValueError: version 0 is not")
