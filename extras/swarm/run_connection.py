"""A host's connection to its run: encrypted, and made anew when it is lost."""

import contextlib
import socket
import time
from collections.abc import Iterator

import zmq
from zmq.utils.monitor import recv_monitor_message

from asyncrl.cluster.fingerprint import code_digest
from asyncrl.cluster.gpus import visible_gpus
from extras.swarm.link import Link
from extras.swarm.wire import (
    JOIN_S,
    PROTOCOL,
    TO_ENGINE,
    TO_HOST,
    Join,
    Leave,
    read_key,
)

MAX_HANDSHAKES = 10
"""Connections that can close before they are encrypted. A wrong key closes all; a tunnel closes some until the run is
there."""
CONNECT_MS = 5000
FAILED_HANDSHAKES = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_AUTH


class RunConnection:
    """One connection after the other: a lost one may have lost messages, so it is never used again."""

    def __init__(self, address: str, key_path: str):
        """Raises ValueError if the key file cannot be read."""
        self.address = address
        self.link = Link((*TO_ENGINE, *TO_HOST), self._send_frames)
        self.has_joined = False
        """The run has welcomed this connection."""
        self.socket: zmq.Socket | None = None
        self._keys = read_key(key_path)
        self._context = zmq.Context()
        self._num_failed = 0  # handshakes

    def join(self, address: str | None = None) -> None:
        """Ask to be let in, at the run's address or that of another node, over a new connection."""
        self.leave()
        self.socket = self._context.socket(zmq.DEALER)
        (
            self.socket.curve_serverkey,
            self.socket.curve_publickey,
            self.socket.curve_secretkey,
        ) = self._keys
        self.socket.set(zmq.LINGER, 1000)
        # no send ever waits: unsent messages go with the connection after SILENCE_S
        self.socket.set(zmq.SNDHWM, 0)
        self.socket.set(zmq.CONNECT_TIMEOUT, CONNECT_MS)
        self._monitor = self.socket.get_monitor_socket(FAILED_HANDSHAKES)
        self.socket.connect(f"tcp://{address or self.address}")
        self.has_joined = False
        self._asked_at = time.monotonic()
        device = "cuda" if visible_gpus() else "cpu"
        self.link.send(Join(PROTOCOL, code_digest(), device, socket.gethostname(), time.time()))

    def leave(self) -> None:
        """Leave the run, and close the connection."""
        if self.socket is not None:
            self.link.send(Leave())
            self.socket.disable_monitor()
            self.socket.close()
            self.socket = None

    def close(self) -> None:
        """Leave for good."""
        self.leave()
        self._context.destroy()

    def _send_frames(self, frames: list[bytes]) -> None:
        # after a refused key there is no connection
        with contextlib.suppress(zmq.Again):
            self.socket.send_multipart(frames, flags=zmq.DONTWAIT)

    def receive(self) -> Iterator[tuple[int, object]]:
        """Yield the messages that have come, each with the engine that it is for, or HOST."""
        while self.socket.poll(0):
            yield self.link.read(self.socket.recv_multipart())

    @property
    def is_lost(self) -> bool:
        """Return whether to join again: the run is silent, or has not answered in time."""
        if self.has_joined:
            return self.link.is_silent
        return time.monotonic() > self._asked_at + JOIN_S

    def check_first_answer(self) -> None:
        """Raise ValueError if the run has another key, or does not answer; before the first welcome."""
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            self._num_failed += MAX_HANDSHAKES if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH else 1
        if self._num_failed >= MAX_HANDSHAKES:
            raise ValueError(
                f"--join {self.address}: what listens there has another key, or is no run; see --key"
            )
        if self.link.silent_s > JOIN_S:
            raise ValueError(
                f"--join {self.address}: no answer in {JOIN_S:.0f} s; is the run there?"
            )
