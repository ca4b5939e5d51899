"""Machines for swarm.py: real ones, each in a process of its own, and many that only sleep and answer.

A real one is `rollout.py --join`, but that it does the work of work.py, with one thread for its engine, as many as that
of a local worker has beside a trainer.
"""

import heapq
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import psutil
import zmq

import rollout
from cluster.fingerprint import code_digest
from data import messages as m
from data.records import Ticket, Trajectory
from data.wire import BEAT_S, MACHINE, Codec, read_key
from engine import join
from scripts.bench.harness import ROOT
from scripts.bench.work import run_work_worker


class Machine:
    """A machine that joins, and may be stopped, killed and started again."""

    def __init__(self, address: str, key: Path, log: Path, within: Sequence[str] = ()):
        """Start it; `within` is put before its command."""
        here = [sys.executable, "-m", "scripts.bench.swarm_machines", "--join", address, "--key", str(key)]
        self.command, self.log = [*within, *here], log
        self.start()

    def start(self) -> None:
        """Start its process."""
        with open(self.log, "a") as log:
            self.process = psutil.Popen(self.command, cwd=ROOT, stdout=log, stderr=log)

    def signal(self, number: int) -> None:
        """Send a signal: SIGTERM to the machine's own process, any other to all of its processes."""
        with suppress(psutil.NoSuchProcess):
            for process in [*self.process.children(recursive=True) * (number != signal.SIGTERM), self.process]:
                process.send_signal(number)

    def end(self) -> None:
        """Have it leave; nothing of it is left."""
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGTERM)
        with suppress(psutil.TimeoutExpired):
            self.process.wait(30.0)
        self.signal(signal.SIGKILL)


class Sleepers:
    """Many machines of one process: each has one ticket at a time, sleeps, and answers with all tokens it may."""

    def __init__(self, address: str, key: str, count: int, tokens: int):
        """Connect; `tokens` is the run's longest response."""
        self.tokens, self.sleep_s, self.num_messages, self.latencies = tokens, 0.0, 0, []
        self.versions, self.due, self.sent_at = {}, [], {}  # what each has, is to answer and when, and has answered
        self.codec, self.poller, context = Codec((*m.TO_ENGINE, *m.TO_MACHINE)), zmq.Poller(), zmq.Context()
        for _ in range(count):
            socket = context.socket(zmq.DEALER)
            socket.curve_serverkey, socket.curve_publickey, socket.curve_secretkey = read_key(key)
            socket.connect(f"tcp://{address}")
            self.poller.register(socket, zmq.POLLIN)
            self._send(socket, m.Join(m.PROTOCOL, code_digest(), "cpu", "sleeper", time.time()), MACHINE)

    def serve(self, pipe: Connection) -> None:
        """Serve until the pipe closes: a number is how long to sleep from now on, None asks for what was counted."""
        beaten_at = time.monotonic()
        while True:
            self._turn(0.05)
            if time.monotonic() > beaten_at + BEAT_S:
                beaten_at = time.monotonic()
                for socket, _ in self.poller.sockets:
                    self._send(socket, m.Beat(), MACHINE)
            if pipe.poll():
                if (sleep_s := pipe.recv()) is None:
                    pipe.send((self.num_messages, self.latencies))
                else:
                    self.sleep_s, self.num_messages, self.latencies = sleep_s, 0, []

    def _send(self, socket: zmq.Socket, message: object, engine: bytes = b"0") -> None:
        self.num_messages += 1
        socket.send_multipart([engine, *self.codec.encode(message)])

    def _turn(self, most_s: float) -> None:
        wait_s = min(most_s, max(0.0, self.due[0][0] - time.monotonic())) if self.due else most_s
        for socket, _ in self.poller.poll(1000 * wait_s):
            with suppress(zmq.Again):
                while True:
                    self._act(socket, self.codec.decode(*socket.recv_multipart(zmq.DONTWAIT)[1:]))
        while self.due and self.due[0][0] <= time.monotonic():
            _, _, socket, ticket = heapq.heappop(self.due)
            self.sent_at[socket] = time.monotonic()
            self._send(socket, m.Finished([asleep(ticket, self.versions[socket], self.tokens)], None))

    def _act(self, socket: zmq.Socket, message: object) -> None:
        self.num_messages += 1
        match message:
            case m.Welcome():
                self._send(socket, m.Ready(0.0))
            case m.Fetch(version):
                self._send(socket, m.Fetched(version))
            case m.Update(version):
                self.versions[socket] = version
                self._send(socket, m.Updated(version, 0.0, m.SampledTokens(), None))
            case m.Tickets([ticket]):
                if socket in self.sent_at:
                    self.latencies.append(time.monotonic() - self.sent_at.pop(socket))
                sleep_s = random.expovariate(1 / self.sleep_s) if self.sleep_s else 0.0  # else all would answer at once
                heapq.heappush(self.due, (time.monotonic() + sleep_s, ticket.ticket_id, socket, ticket))


def asleep(ticket: Ticket, version: int, tokens: int) -> Trajectory:
    """What a machine that sleeps says to a ticket: as many tokens as it may, all alike, and cut."""
    mask = np.arange(len(ticket.prompt_tokens) + tokens) >= len(ticket.prompt_tokens)
    response = np.array([*ticket.prompt_tokens, *[ticket.prompt_tokens[0]] * tokens], np.int64)
    logprobs, versions = np.where(mask, -1.0, 0.0).astype(np.float32), np.where(mask, version, -1).astype(np.int32)
    of, now = (ticket.ticket_id, ticket.group_id, ticket.member, response, mask, logprobs, versions), time.time()
    return Trajectory(*of, float(ticket.member % 2), "length", "", 1, now, now, 0, ((now, now, now),))


def run_sleepers(pipe: Connection, *options) -> None:
    """What a process of Sleepers runs."""
    os.setsid()
    with suppress(EOFError):
        Sleepers(*options).serve(pipe)


if __name__ == "__main__":
    real, join.available_cores = join.JoinedMachine, lambda: 1
    join.JoinedMachine = lambda address, key, main, folder: real(address, key, run_work_worker, folder)
    rollout.main()
