"""The host's end of weights that are pulled: takes in a version while engines sample with the one before.

If the run has a file system (snapshots.py), a version comes from there. Else it comes by the socket in pieces, whole or
as a delta. The host holds one payload, and one more while the next comes in.
"""

import queue
import threading
from collections.abc import Callable

import numpy as np
import torch

from asyncrl.engine.rewards import one_line
from asyncrl.weights.transport import parameter_views, payload_bytes, specs_of
from extras.swarm.delta import Snapshot, apply_delta, compute_digest
from extras.swarm.snapshots import read_snapshot
from extras.swarm.wire import Piece, Pull


class Puller:
    """The version that is here, and the way to the next. One thread makes all calls."""

    def __init__(
        self, init_info: dict, ask: Callable[[Pull], None], wake: Callable[[], None] | None = None
    ):
        """`init_info` is the layout of a snapshot, and `ask(pull)` asks the run for a piece.

        `wake()` is called from another thread when `collect` has something to take; without it no files are read.
        """
        self.specs = specs_of(**init_info)
        self.num_bytes = payload_bytes(self.specs)
        self.wanted: dict | None = None
        """The update info of the version that is on its way."""
        self.here: Snapshot | None = None
        """The version that is here whole."""
        self._ask, self._wake = ask, wake
        self._is_asking = False  # whether a piece of the wanted version is to come
        self._base: int | None = None  # version that the run's side is to count from
        # of the socket: (is_delta, bytes in all), and the bytes that have come
        self._stream, self._got = None, bytearray()
        self._reading: dict | None = (
            None  # update info of the version that is being read from files
        )
        self._read: queue.SimpleQueue = queue.SimpleQueue()

    def parameters(self) -> list[tuple[str, torch.Tensor]]:
        """Return (Hugging Face name, tensor) of every parameter of the version that is here."""
        return parameter_views(torch.from_numpy(self.here.payload), self.specs)

    def want(self, info: dict) -> None:
        """Make a version come in, by the update info of its announcement. It continues if it is wanted already."""
        if info != self.wanted:
            self._begin(info, self.here and self.here.version)
            # if older files hang: by the socket
            if self._wake is not None and "snapshots" in info and self._reading is None:
                self._reading = info
                arguments = info, self.here
                threading.Thread(target=self._read_files, args=arguments, daemon=True).start()
        elif self._is_asking:
            return
        self.resume()

    def resume(self) -> None:
        """Ask for the rest of the wanted version, unless files have it."""
        if self.wanted is not None and self._reading != self.wanted:
            self._is_asking = True
            self._ask(Pull(self.wanted["version"], self._base, len(self._got)))

    def forget_request(self) -> None:
        """Note that the connection was lost: no piece will come. Those that have come stay."""
        self._is_asking = False

    def give_up(self) -> None:
        """Stop: the version is gone."""
        self._begin(None, None)

    def _begin(self, info: dict | None, base: int | None) -> None:
        self.wanted, self._base = info, base
        self._stream, self._got = None, bytearray()

    def take(self, piece: Piece) -> bool:
        """Take in a piece, and ask for the next. Return whether the wanted version is whole.

        Raises ValueError if a piece cannot be of a snapshot, or if the whole has another digest than announced.
        """
        self._check(piece)
        if (
            self.wanted is None
            or piece.version != self.wanted["version"]
            or (piece.is_delta and self._base is None)
        ):
            return False  # it was asked for once, but is wanted no more
        self._is_asking = False
        if self._stream != (piece.is_delta, piece.num_bytes):
            was_another = self._stream is not None
            self._begin(self.wanted, self._base)
            self._stream = (piece.is_delta, piece.num_bytes)
            if was_another and piece.offset:
                self.resume()  # from its start
        if piece.offset != len(self._got):
            return False
        self._got += piece.data
        if len(self._got) == piece.num_bytes:
            return self._complete(piece.is_delta)
        self.resume()
        return False

    def _check(self, piece: Piece) -> None:
        """Raise ValueError for sizes that no snapshot or delta has, before memory is taken for them."""
        is_sized = (
            piece.num_bytes < self.num_bytes
            if piece.is_delta
            else piece.num_bytes == self.num_bytes
        )
        if not (is_sized and 0 <= piece.offset < piece.offset + len(piece.data) <= piece.num_bytes):
            kind = "delta" if piece.is_delta else "snapshot"
            raise ValueError(
                f"a piece of {len(piece.data)} bytes at {piece.offset} of a {kind} of {piece.num_bytes}; "
                f"a snapshot has {self.num_bytes}"
            )

    def _complete(self, is_delta: bool) -> bool:
        info, payload = self.wanted, np.frombuffer(self._got, np.uint8)
        try:
            if is_delta:
                payload = self.here.payload.copy()
                apply_delta(self._got, self._base, payload)
            if compute_digest(payload) != info["digest"]:
                raise ValueError(
                    f"version {info['version']} arrived broken: its digest is not the one announced"
                )
        except ValueError:
            self._begin(info, None)
            if not is_delta:
                raise
            self.resume()  # whole this time
            return False
        self._arrive(Snapshot(info["version"], info["digest"], payload))
        return True

    def _arrive(self, snapshot: Snapshot) -> None:
        self.here = snapshot
        self.give_up()

    def collect(self) -> bool:
        """Take in a version that was read from files. If that failed, ask by the socket.

        Return whether the wanted version is whole.
        """
        if self._read.empty():
            return False
        info, found = self._read.get()
        self._reading = None
        if info != self.wanted:
            return False
        if isinstance(found, Snapshot):
            self._arrive(found)
            return True
        print(
            f"weights of version {info['version']} come by the socket: {one_line(found)}",
            flush=True,
        )
        self.resume()
        return False

    def _read_files(self, info: dict, base: Snapshot | None) -> None:
        try:
            found = read_snapshot(info, base, self.num_bytes)
        except Exception as error:
            # each file system has other errors; then the socket is used
            found = error
        self._read.put((info, found))
        self._wake()
