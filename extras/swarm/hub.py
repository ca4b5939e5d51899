"""The run's end of the connections of a swarm: one ROUTER socket, encrypted and authenticated both ways by CURVE.

`runs/NAME/swarm.key` has the keys of the run. Everyone who has that file can sample for the run. One thread does all
input and output.
"""

import json
import os
import queue
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import zmq
from zmq.auth.thread import ThreadAuthenticator

from extras.swarm import link
from extras.swarm.wire import read_key

MAX_MESSAGE_BYTES = 64 << 20
MAX_UNSENT = 10_000
"""Messages that can wait for one host; a slower reader is cut off."""
READ_S = 0.1
"""Longest time of reading before messages are sent, seconds."""


def make_key(path: Path) -> tuple[bytes, bytes, bytes]:
    """Write the key file of a run, and beside it the run's secret; only their owner can read them.

    A run that is resumed keeps both. Return the run's public and secret key, and the hosts' public key.
    """
    own = path.with_suffix(".secret")
    if own.exists():  # it is written last
        public, client_public, _ = read_key(str(path))
        return public, own.read_bytes(), client_public
    (public, secret), (client_public, client_secret) = zmq.curve_keypair(), zmq.curve_keypair()
    keys = {
        "run": public.decode(),
        "machine": client_public.decode(),
        "machine_secret": client_secret.decode(),
    }
    for target, content in ((path, json.dumps(keys).encode()), (own, secret)):
        target.unlink(missing_ok=True)
        with open(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(content)
    return public, secret, client_public


class Hub:
    """The run's end of all connections: an encrypted socket, and the thread that reads and writes it."""

    def __init__(self, address: str, keys: tuple[bytes, bytes, bytes]):
        """Bind the socket, with what `make_key` gave. Raises ValueError if the address is taken."""
        self._to_do: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._context = zmq.Context()
        public, secret, client_public = keys
        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.start()
        hosts = SimpleNamespace(callback=lambda domain, key: key == client_public)
        self._authenticator.configure_curve_callback(credentials_provider=hosts)
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.curve_publickey, self._socket.curve_secretkey, self._socket.curve_server = (
            public,
            secret,
            True,
        )
        self._socket.set(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._socket.set(zmq.SNDHWM, MAX_UNSENT)
        self._socket.set(zmq.LINGER, 2000)
        self._socket.set(zmq.ROUTER_MANDATORY, 1)
        try:
            self._socket.bind(f"tcp://{address}")
        except zmq.ZMQError as error:
            self._close()
            raise ValueError(
                f"--listen {address}: {error.strerror}; give a free HOST:PORT of this machine"
            ) from None
        self.port = int(self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        self._thread, self._serving, self._is_ending = ThreadPoolExecutor(1), None, False

    def start(
        self,
        receive: Callable[[list[bytes]], None],
        beat: Callable[[], None],
        end: Callable[[], None],
    ) -> Future:
        """Begin to serve, in a thread that is returned.

        `receive(frames)` takes each message. `beat()` is called every BEAT_S, and `end()` before the socket is closed.
        """
        self._serving = self._thread.submit(self._serve, receive, beat, end)
        return self._serving

    def do_soon(self, act: Callable[[], None]) -> None:
        """Call `act()` in the hub's thread; from any thread."""
        self._to_do.put(act)
        os.eventfd_write(self._wake, 1)

    def send(self, frames: list[bytes]) -> str | None:
        """Send frames to the host that the first one names, in the hub's thread. Return why that failed, or None."""
        try:
            self._socket.send_multipart(frames, flags=zmq.DONTWAIT)
        except zmq.ZMQError as error:
            return error.strerror  # its connection is gone, or it reads too slowly
        return None

    def stop(self) -> None:
        """End the thread and close the socket."""
        self._is_ending = True
        os.eventfd_write(self._wake, 1)
        if self._serving is None:
            self._close()
        else:
            self._serving.exception()  # waits; the run has ended with it, if there is one
        self._thread.shutdown()

    def _serve(self, receive: Callable, beat: Callable, end: Callable) -> None:
        poller, beaten_at = zmq.Poller(), time.monotonic()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        try:
            while not self._is_ending:
                ready = dict(poller.poll(1000 * link.BEAT_S / 2))
                if self._wake in ready:
                    os.eventfd_read(self._wake)
                # first: a host that has gone may have told why
                if self._socket in ready:
                    self._receive_some(receive)
                self._do_all()
                if time.monotonic() > beaten_at + link.BEAT_S:
                    beaten_at = time.monotonic()
                    beat()
            self._do_all()
            end()
        finally:
            self._close()

    def _do_all(self) -> None:
        while not self._to_do.empty():
            self._to_do.get()()

    def _receive_some(self, receive: Callable) -> None:
        until = time.monotonic() + READ_S
        while time.monotonic() < until:
            try:
                receive(self._socket.recv_multipart(flags=zmq.DONTWAIT))
            except zmq.Again:
                return

    def _close(self) -> None:
        self._authenticator.stop()
        self._context.destroy()
