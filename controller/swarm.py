"""The swarm: machines that join a run while it goes, sample for it, and leave (Echo, arXiv 2508.05387).

A machine that joins is one or more `Worker`s whose pipe is a socket and whose weights are pulled; dispatcher, buffer
and ledger do not know the difference. A machine that leaves, dies or falls silent is the death of its workers, whose
tickets are issued again; what it says afterwards is of nobody, and only counted.

One ROUTER socket, encrypted and authenticated both ways by CURVE: `runs/NAME/swarm.key` has the keys of the run, and
whoever has that file may sample for it. One thread does all input and output.
"""

import json
import os
import queue
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import zmq
from zmq.auth.thread import ThreadAuthenticator

from controller.workers import Worker
from data.messages import (
    FROM_ENGINE,
    FROM_MACHINE,
    PROTOCOL,
    Beat,
    Finished,
    Gone,
    Join,
    Leave,
    Piece,
    Pull,
    Ready,
    Refused,
    Welcome,
)
from data.wire import BEAT_S, MACHINE, SILENCE_S, Codec
from weights.pull import PIECE_BYTES, PullTransport

MAX_MESSAGE_BYTES = 64 << 20
MAX_UNSENT = 10_000
"""Messages that wait for one machine; a slower reader is cut off."""


def make_key(path: Path) -> tuple[bytes, bytes, bytes]:
    """Write the key file of a run, readable by its owner alone. Returns the run's two keys and the machines' public."""
    (public, secret), (client_public, client_secret) = zmq.curve_keypair(), zmq.curve_keypair()
    keys = {"run": public.decode(), "machine": client_public.decode(), "machine_secret": client_secret.decode()}
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        json.dump(keys, file)
    return public, secret, client_public


class RemoteProcess:
    """An engine of another machine, with the calls of WorkerProcess."""

    exit_code = None

    def __init__(self, send: Callable[[object], None], name: str):
        self.send, self.name = send, name
        self.started_at = time.monotonic()
        self.reading: Future = Future()

    def stop(self, timeout_s: float) -> None:
        """Nothing: it was told, and nobody waits for another machine."""

    def dump_stacks(self) -> None:
        """Nothing: its stacks are its machine's."""

    def death_report(self) -> str:
        """Who it is."""
        return f"{self.name} has left"


@dataclass
class Machine:
    """A machine that has joined."""

    identity: bytes
    host: str
    engines: dict[int, Worker] = field(default_factory=dict)
    """Those that are up."""
    heard_at: float = field(default_factory=time.monotonic)
    num_bytes: int = 0
    """Sent to it, weights included."""


class Swarm:
    """Listens for machines, and carries messages between them and the controller."""

    def __init__(self, address: str, key_path: Path, code: str, welcome: Welcome):
        """Bind the socket, make the key, and say how to join; machines whose `code` differs are refused.

        Raises ValueError if the address is taken.
        """
        self.address, self.code, self.welcome = address, code, welcome
        self.num_late = 0
        """Messages from engines of machines that were gone already."""
        self._machines: dict[bytes, Machine] = {}
        self._codec = Codec((*FROM_ENGINE, *FROM_MACHINE))
        self._outbox: queue.SimpleQueue = queue.SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._context = zmq.Context()
        self._socket = self._listen(make_key(key_path))
        print(f"sample for this run elsewhere: python rollout.py --join {address} --key {key_path}", flush=True)
        self._encoding = ThreadPoolExecutor(1)
        self._ending = False
        self._serving: Future | None = None

    def _listen(self, keys: tuple[bytes, bytes, bytes]) -> zmq.Socket:
        public, secret, client_public = keys
        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(credentials_provider=_Only(client_public))
        socket = self._context.socket(zmq.ROUTER)
        socket.curve_publickey, socket.curve_secretkey, socket.curve_server = public, secret, True
        socket.set(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.set(zmq.SNDHWM, MAX_UNSENT)
        socket.set(zmq.LINGER, 2000)
        socket.set(zmq.ROUTER_MANDATORY, 1)
        try:
            socket.bind(f"tcp://{self.address}")
        except zmq.ZMQError as error:
            raise ValueError(
                f"--listen {self.address}: {error.strerror}; give a free HOST:PORT of this machine"
            ) from None
        return socket

    def start(self, weights: PullTransport, join: Callable, on_message: Callable) -> Future:
        """Let machines in, which pull these weights. Returns the swarm's thread, with the error that may end it.

        In it `join(process)` is called, which makes a worker, and `on_message(worker, message or None)`.
        """
        self.weights, self._join, self._on_message = weights, join, on_message
        self._serving = ThreadPoolExecutor(1).submit(self._serve)
        return self._serving

    def stop(self) -> None:
        """Tell all machines that the run has ended, and close the socket."""
        self._ending = True
        os.eventfd_write(self._wake, 1)
        if self._serving is None:
            self._close()
        else:
            self._serving.exception()  # which the run has ended with, if there is one

    # In the swarm's thread

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        beaten_at = time.monotonic()
        try:
            while not self._ending:
                ready = dict(poller.poll(1000 * BEAT_S / 2))
                if self._wake in ready:
                    os.eventfd_read(self._wake)
                self._send_all()
                if self._socket in ready:
                    self._receive_all()
                if time.monotonic() > beaten_at + BEAT_S:
                    beaten_at = time.monotonic()
                    self._beat()
            for machine in list(self._machines.values()):
                self._send(machine, MACHINE, Leave())
        finally:
            self._close()

    def _close(self) -> None:
        self._authenticator.stop()
        self._context.destroy()
        self._encoding.shutdown()

    def _post(self, machine: Machine, engine: bytes, message: object) -> None:
        """Queue a message; from any thread."""
        self._outbox.put((machine, engine, message))
        os.eventfd_write(self._wake, 1)

    def _send_all(self) -> None:
        while True:
            try:
                machine, engine, message = self._outbox.get_nowait()
            except queue.Empty:
                return
            if machine.identity in self._machines:
                self._send(machine, engine, message)

    def _send(self, machine: Machine, engine: bytes, message: object) -> None:
        frames = [machine.identity, engine, *self._codec.encode(message)]
        try:
            self._socket.send_multipart(frames, flags=zmq.DONTWAIT)
        except zmq.ZMQError as error:  # its connection is gone, or it reads too slowly
            self._lose(machine, f"cannot be reached ({error.strerror})")
            return
        machine.num_bytes += sum(map(len, frames))

    def _receive_all(self) -> None:
        while True:
            try:
                frames = self._socket.recv_multipart(flags=zmq.DONTWAIT)
            except zmq.Again:
                return
            self._receive(frames)

    def _receive(self, frames: list[bytes]) -> None:
        machine = self._machines.get(frames[0])
        try:
            if len(frames) != 4:
                raise ValueError(f"a message of {len(frames)} frames, not 4")
            message = self._codec.decode(*frames[2:])
            if isinstance(message, Join):
                self._let_in(frames[0], message)
            elif machine is None:
                self.num_late += 1
                self._send(Machine(frames[0], "?"), MACHINE, Refused("this connection has not joined; join again"))
            else:
                machine.heard_at = time.monotonic()
                self._act(machine, frames[1], message)
        except ValueError as error:
            if machine is not None:
                self._lose(machine, f"sent {error}")

    def _let_in(self, identity: bytes, join: Join) -> None:
        if identity in self._machines:
            self._lose(self._machines[identity], "joined again")
        machine, why = Machine(identity, join.host[:64]), None
        if join.protocol != PROTOCOL:
            why = f"its protocol is {join.protocol}, the run's {PROTOCOL}"
        elif join.code != self.code:
            why = f"its code is {join.code[:12]}, the run's {self.code[:12]}"
        if why is not None:
            print(f"swarm: {machine.host} was refused: {why}", flush=True)
            self._send(machine, MACHINE, Refused(f"{why}; check out the same commit"))
            return
        self._machines[identity] = machine
        print(f"swarm: {machine.host} has joined with {join.num_engines} engines", flush=True)
        self._send(machine, MACHINE, self.welcome)

    def _act(self, machine: Machine, engine: bytes, message: object) -> None:
        match message:
            case Beat():
                return
            case Leave():
                self._lose(machine, "has left")
            case Pull(version, base):
                opening = self._encoding.submit(self.weights.open, version, base)
                opening.add_done_callback(lambda opened: self._answer(machine, message, opened))
            case Ready() if engine.isdigit() and int(engine) not in machine.engines:
                process = RemoteProcess(
                    lambda m: self._post(machine, engine, m), f"engine {int(engine)} of {machine.host}"
                )
                machine.engines[int(engine)] = worker = self._join(process)
                self._on_message(worker, message)
            case _ if engine.isdigit() and int(engine) in machine.engines:
                worker = machine.engines[int(engine)]
                if isinstance(message, Finished):  # the controller knows it by another number
                    message = replace(
                        message, trajectories=[replace(t, worker=worker.index) for t in message.trajectories]
                    )
                self._on_message(worker, message)
            case _:
                raise ValueError(f"{type(message).__name__} of an engine {engine[:8]!r} that is not up")

    def _answer(self, machine: Machine, pull: Pull, opened: Future) -> None:
        if opened.exception() is not None:
            self._post(machine, MACHINE, Gone(pull.version))
            return
        is_delta, stream = opened.result()
        data = bytes(memoryview(stream)[pull.offset : pull.offset + PIECE_BYTES])
        self._post(machine, MACHINE, Piece(pull.version, is_delta, len(stream), pull.offset, data))

    def _beat(self) -> None:
        for machine in list(self._machines.values()):
            if time.monotonic() > machine.heard_at + SILENCE_S:
                self._lose(machine, f"was silent for {SILENCE_S:.0f} s")
            else:
                self._send(machine, MACHINE, Beat())

    def _lose(self, machine: Machine, why: str) -> None:
        """Take a machine for gone: its workers have died."""
        if self._machines.pop(machine.identity, None) is None:
            return
        tickets = sum(len(worker.running) for worker in machine.engines.values())
        print(f"swarm: {machine.host} {why}; its {tickets} tickets are issued again", flush=True)
        for worker in machine.engines.values():
            self._on_message(worker, None)


class _Only:
    """Lets in those who have the machines' secret key."""

    def __init__(self, public: bytes):
        self.public = public

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether a key is that of the run's file."""
        return key == self.public
