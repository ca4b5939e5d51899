"""Snapshots as files, on any file system that fsspec knows, so that hosts spare the trainer's uplink.

    VERSION-DIGEST.snapshot                   a whole one: zstd of its payload
    VERSION-DIGEST_VERSION-DIGEST.snapshot    the delta from one to another

A file gets its name when it is complete. An update info has only the URL of the folder; hosts list the folder.
"""

import contextlib
import os
import queue
import re
import threading
import time
from collections.abc import Iterable

import numpy as np
import zstandard

from asyncrl.engine.rewards import one_line
from extras.swarm.delta import LEVEL, Snapshot, apply_delta, compute_digest, encode_delta

ANCHOR_EVERY = 20
"""Versions from one whole file, or anchor, to the next."""
KEPT_ANCHORS = 2
WAIT_S, POLL_S = 30.0, 0.5
"""Time that a host gives the trainer to write an announced version; how often it looks."""
CLOSE_S = 10.0
"""Time that the trainer gives the file system to remove all files at the end."""
NAME = re.compile(r"(?:(\d+-[0-9a-f]{16})_)?(\d+-[0-9a-f]{16})\.snapshot")
"""Name of a file: the base of a delta, if it is one, and the snapshot that it leads to."""


def _node(version: int, digest: str) -> str:
    return f"{version:08d}-{digest[:16]}"


def _version(node: str) -> int:
    return int(node.partition("-")[0])


class Folder:
    """A folder of snapshots. All calls raise errors of its file system."""

    def __init__(self, url: str):
        import fsspec  # slow to import

        self.fs, self.root = fsspec.url_to_fs(url)

    def sizes(self) -> dict[str, int]:
        """Return the bytes of all snapshots and deltas, by name."""
        self.fs.invalidate_cache()
        listed = (
            (entry["name"].rpartition("/")[2], entry["size"])
            for entry in self.fs.ls(self.root, detail=True)
        )
        return {name: num_bytes or 0 for name, num_bytes in listed if NAME.fullmatch(name)}

    def path(self, name: str) -> str:
        """Return the path of a file."""
        return f"{self.root}/{name}"

    def write(self, name: str, parts: Iterable[bytes]) -> None:
        """Write a file. It gets its name when it is complete."""
        with self.fs.open(self.path("part"), "wb") as file:
            file.writelines(parts)
        self.fs.mv(self.path("part"), self.path(name))


class SnapshotWriter:
    """The trainer's end: a thread writes each version as a file, so that no step waits for it.

    Beside the versions of pull.py it holds at most two payloads: the next one, and the last written one.
    """

    def __init__(self, url: str):
        """`url` is a folder of this run only. Snapshots of the run's earlier starts are removed.

        Raises ValueError if files cannot be written, read and removed there.
        """
        self.url = url if "://" in url else os.path.abspath(os.path.expanduser(url))
        self.is_failing = False
        """Writing the last version failed: hosts are not sent here then."""
        self._generations: list[list[str]] = []  # of files: each is an anchor, and the deltas since
        self._written: Snapshot | None = None
        self._next: queue.Queue = queue.Queue(maxsize=1)
        try:
            self._folder = self._open()
        except Exception as error:  # each file system has other errors
            why = (
                f"is no folder to write to ({one_line(error)}); give one that the hosts reach, too"
            )
            raise ValueError(f"--swarm.snapshots {url}: {why}") from None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _open(self) -> Folder:
        folder = Folder(self.url)
        folder.fs.makedirs(folder.root, exist_ok=True)
        folder.write("probe", [b"snapshots"])
        content = folder.fs.cat_file(folder.path("probe"))
        if content != b"snapshots":
            raise ValueError(f"what was written is read as {content[:20]!r}")
        for name in ("probe", *folder.sizes()):
            folder.fs.rm_file(folder.path(name))
        return folder

    def write(self, snapshot: Snapshot | None) -> None:
        """Queue a version for writing, in place of one that still waits. None is the end."""
        with contextlib.suppress(queue.Empty):
            self._next.get_nowait()
        self._next.put(snapshot)  # only one thread calls this, so there is room

    def close(self) -> None:
        """Remove all files, if the file system does that in time."""
        self.write(None)
        self._thread.join(CLOSE_S)

    # In its thread

    def _run(self) -> None:
        while (snapshot := self._next.get()) is not None:
            try:
                self._write(snapshot)
                self.is_failing = False
            except Exception as error:
                # each file system has other errors; then the socket is used
                if not self.is_failing:  # one line for all that fail in a row
                    why = f"cannot be written to {self.url} ({one_line(error)})"
                    print(
                        f"snapshots: version {snapshot.version} {why}; hosts pull by the socket",
                        flush=True,
                    )
                self.is_failing = True
        # Each file system has other errors. The next start of the run removes files that remain.
        with contextlib.suppress(Exception):
            self._keep(0)

    def _write(self, new: Snapshot) -> None:
        base, delta, name = self._written, None, f"{_node(new.version, new.digest)}.snapshot"
        if base is not None:
            delta = encode_delta(base.version, base.payload, new.payload)
        if delta is not None:
            delta_name = f"{_node(base.version, base.digest)}_{name}"
            self._folder.write(delta_name, [delta])
            self._generations[-1].append(delta_name)
            self._written = new
        if delta is None or len(self._generations[-1]) > ANCHOR_EVERY:
            compressor = zstandard.ZstdCompressor(level=LEVEL)
            self._folder.write(name, compressor.read_to_iter(new.payload, size=len(new.payload)))
            self._generations.append([name])
            self._written = new
            self._keep(KEPT_ANCHORS)

    def _keep(self, num_anchors: int) -> None:
        """Remove all files from before the last anchors."""
        while len(self._generations) > num_anchors:
            for name in self._generations[0]:
                with contextlib.suppress(FileNotFoundError):  # it was removed by other hands
                    self._folder.fs.rm_file(self._folder.path(name))
            # only now: files that an error leaves there are removed the next time
            del self._generations[0]


def read_snapshot(info: dict, base: Snapshot | None, num_bytes: int) -> Snapshot:
    """Return a version from files, by the update info of its announcement: from `base` or an anchor, by fewest bytes.

    Waits until the trainer has written it. Raises ValueError if it is missing, ValueError or ZstdError if it is broken,
    or errors of the file system.
    """
    folder = Folder(info["snapshots"])
    files = _await_files(folder, info, base)
    payload = None if files else base.payload
    for name in files:
        start = NAME.fullmatch(name)[1]
        if start is None:
            payload = np.zeros(num_bytes, np.uint8)
            with folder.fs.open(folder.path(name), "rb") as file:
                zstandard.ZstdDecompressor().stream_reader(file).readinto(payload)
        else:
            payload = base.payload.copy() if payload is None else payload
            delta = folder.fs.cat_file(folder.path(name), 0, num_bytes)  # no delta is larger
            apply_delta(delta, _version(start), payload)
    if compute_digest(payload) != info["digest"]:
        raise ValueError(
            f"the files of version {info['version']} in {info['snapshots']} are broken"
        )
    return Snapshot(info["version"], info["digest"], payload)


def _await_files(folder: Folder, info: dict, base: Snapshot | None) -> list[str]:
    wanted, deadline = _node(info["version"], info["digest"]), time.monotonic() + WAIT_S
    here = None if base is None else _node(base.version, base.digest)
    while (files := find_cheapest_way(sizes := folder.sizes(), wanted, here)) is None:
        is_past = any(_version(NAME.fullmatch(name)[2]) > info["version"] for name in sizes)
        if is_past or time.monotonic() > deadline:
            raise ValueError(f"version {info['version']} is not in {info['snapshots']}")
        time.sleep(POLL_S)
    return files


def find_cheapest_way(sizes: dict[str, int], wanted: str, here: str | None) -> list[str] | None:
    """Return the files of fewest bytes that lead from `here`, or from a whole file, to `wanted`; None without a way."""
    deltas = {match[2]: match for match in map(NAME.fullmatch, sizes) if match[1] is not None}
    ways, chain, node = [], [], wanted
    while True:
        if f"{node}.snapshot" in sizes:
            ways.append([f"{node}.snapshot", *chain])
        if node == here:
            ways.append(chain.copy())
        # popped, so that no ring of names holds this loop
        if (delta := deltas.pop(node, None)) is None:
            return min(ways, key=lambda files: sum(map(sizes.get, files)), default=None)
        chain.insert(0, delta[0])
        node = delta[1]
