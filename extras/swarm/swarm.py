"""The swarm: hosts that join a run while it goes, sample for it, and leave (Echo, arXiv 2508.05387).

An engine of a host is a `Worker` whose pipe is a socket and whose weights are pulled. Dispatcher, buffer and ledger do
not know the difference. A host that leaves, dies or falls silent is the death of its workers. Their tickets are issued
again. Later answers of the host are only counted.

| file | its part at the run's end |
|---|---|
| hub.py, link.py, wire.py | connections; messages as bytes |
| admission.py | which hosts may join |
| members.py | the hosts that are there or shut out, and their metrics |
| intake.py, trust.py | answers of engines: checked, and given to the controller |
| pull.py, snapshots.py | weights |
| remote.py, leases.py, controller.py | workers of hosts, tickets that move, batches that are held |
| verify.py | log-probs and rewards of a share of the responses, computed again |
"""

import functools
import time
from concurrent.futures import Future, ThreadPoolExecutor

from asyncrl.config import Config
from asyncrl.messages import Finished, Ready
from asyncrl.runlog.metrics import Measured
from asyncrl.runlog.run_directory import RunDirectory
from asyncrl.weights.transport import ParameterSpec
from extras.swarm.admission import Admission
from extras.swarm.controller import SwarmController
from extras.swarm.hub import Hub
from extras.swarm.intake import Intake
from extras.swarm.link import Link
from extras.swarm.members import Host, Members
from extras.swarm.pull import KEPT, PIECE_BYTES, PullTransport
from extras.swarm.snapshots import SnapshotWriter
from extras.swarm.wire import (
    FROM_ENGINE,
    FROM_HOST,
    HOST,
    Beat,
    Join,
    JoinAgain,
    Leave,
    Piece,
    Pull,
    Refused,
    Welcome,
    printable,
)

MAX_ENGINES = 256
"""Engines of one host."""
MAX_SHOWN = 300
"""Characters that are shown of a disbelieved message."""


class Swarm:
    """Listens for hosts, and carries messages between them and the controller; in the hub's thread."""

    def __init__(
        self,
        config: Config,
        model_path: str,
        address: str,
        keys: tuple[bytes, bytes, bytes],
        run: RunDirectory,
    ):
        """Listen at HOST:PORT with the run's keys, and write events to `run`.

        Raises ValueError if the address is taken, or snapshots cannot be written to --swarm.snapshots.
        """
        self.config, self.record_event, self._model_path = config, run.record_event, model_path
        self.admission, self.members = Admission(config, model_path), Members(run.record_event)
        snapshots = f"{config.swarm.snapshots}/{run.path.relative_to(config.runs_dir)}"
        self._writer = SnapshotWriter(snapshots) if config.swarm.snapshots else None
        self.hub = Hub(address, keys)
        self.verified: Measured = {}
        """Metrics of verification (verify.py)."""
        self._encoding = ThreadPoolExecutor(1)

    # Called by other threads

    def make_transport(self, specs: list[ParameterSpec]) -> PullTransport:
        """Make the transport of weights to hosts."""
        return PullTransport(specs, self._writer, max(KEPT, self.config.swarm.refresh_lag + 2))

    def start(self, controller: SwarmController) -> None:
        """Let hosts in."""
        self.controller = controller
        self.intake = Intake(self.config, controller, self._model_path)
        controller.workers.watch(self.hub.start(self._receive, self.beat, self._end))

    def stop(self) -> None:
        """Tell all hosts that the run has ended, and listen no more."""
        self.hub.stop()
        self._encoding.shutdown()

    def shut_out(self, worker: int, why: str) -> None:
        """Shut out the host of a worker: it is not believed, and must not join again."""
        identity = self.members.identities[worker]
        if identity not in self.members.shut_out:
            self.members.shut_out.add(identity)
            self.hub.do_soon(functools.partial(self._lose_liar, identity, why))

    def take_metrics(self) -> Measured:
        """Take the metrics `swarm/*` of hosts since the last call."""
        return self.members.take_metrics() | self.verified

    # Messages

    def _send_frames(self, identity: bytes, frames: list[bytes]) -> None:
        why = self.hub.send([identity, *frames])
        if why is not None and identity in self.members.hosts:
            self._lose(self.members.hosts[identity], f"cannot be reached ({why})")

    def _send_soon(self, host: Host, engine: int, message: object) -> None:
        self.hub.do_soon(functools.partial(self._send_if_there, host, engine, message))

    def _send_if_there(self, host: Host, engine: int, message: object) -> None:
        if self.members.hosts.get(host.identity) is host:
            host.link.send(message, engine)

    def _receive(self, frames: list[bytes]) -> None:
        identity = frames[0]
        if identity in self.members.shut_out:
            return
        host = self.members.hosts.get(identity)
        if host is None:
            link = Link((*FROM_ENGINE, *FROM_HOST), functools.partial(self._send_frames, identity))
            host = Host(identity, link)
        try:
            engine, message = host.link.read(frames[1:])
            if isinstance(message, Join):
                self._on_join(host, message)
            elif identity not in self.members.hosts:
                self._on_stranger(host, message)
            else:
                self._act(host, engine, message)
        except ValueError as error:
            if identity not in self.members.hosts:
                self.members.add(host)
            self._lose(host, f"sent {error}", is_believed=False)

    def _on_join(self, host: Host, join: Join) -> None:
        if host.identity in self.members.hosts:
            raise ValueError("a Join after its Join")
        if not 0 <= join.unix_time < 1e11:
            raise ValueError(f"{join.unix_time:.4g} as its clock")
        host.name = printable(join.host[:64]).replace("/", "_")
        answer = self.admission.answer(join)
        if isinstance(answer, Refused):
            print(f"swarm: {host.name} was refused: {answer.reason}", flush=True)
        elif isinstance(answer, Welcome):
            host.clock_ahead_s = join.unix_time - time.time()
            self.members.add(host)
            self.record_event("machine_joined", machine=host.name)
            print(f"swarm: {host.name} has joined", flush=True)
        host.link.send(answer)

    def _on_stranger(self, host: Host, message: object) -> None:
        """Count the late trajectories of a host that was given up, and make it join again."""
        if isinstance(message, Finished):
            self.members.counts["late"] += len(message.trajectories)
        if not isinstance(message, Leave):
            host.link.send(JoinAgain())

    def _act(self, host: Host, engine: int, message: object) -> None:
        match message:
            case Beat():
                return
            case Leave():
                self._lose(host, "has left")
            case Pull():
                self._open(host, message)
            case Ready() if 0 <= engine < MAX_ENGINES and engine not in host.engines:
                post = functools.partial(self._send_soon, host, engine)
                worker = self.intake.start_engine(host, message, post)
                self.members.add_engine(host, engine, worker)
                self.controller.on_message(worker, message)
            case _ if engine in host.engines:
                self.intake.receive(host, host.engines[engine], message)
            case _:
                raise ValueError(f"{type(message).__name__} of an engine {engine} that is not up")

    # Weights

    def _open(self, host: Host, pull: Pull) -> None:
        if host.is_pulling or pull.offset < 0:
            raise ValueError(
                f"a Pull from byte {pull.offset}" + " while it pulls" * host.is_pulling
            )
        host.is_pulling = True
        opening = self._encoding.submit(self.controller.pulled.open, pull.version, pull.base)
        answer = functools.partial(self._answer, host, pull)
        opening.add_done_callback(
            lambda opened: self.hub.do_soon(functools.partial(answer, opened))
        )

    def _answer(self, host: Host, pull: Pull, opened: Future) -> None:
        host.is_pulling = False
        try:
            is_delta, stream = opened.result()
        except ValueError:
            # there are newer ones, and too many hosts that read older ones
            for worker in host.engines.values():
                self.controller.fetch_anew(worker, pull.version)
            return
        data = bytes(memoryview(stream)[pull.offset : pull.offset + PIECE_BYTES])
        piece = Piece(pull.version, is_delta, len(stream), pull.offset, data)
        self._send_if_there(host, HOST, piece)

    # Ends

    def beat(self) -> None:
        """Give signs of life, and give up silent hosts; in the hub's thread."""
        for host in list(self.members.hosts.values()):
            if host.link.is_silent:
                self._lose(host, f"was silent for {host.link.silent_s:.0f} s")
            else:
                host.link.beat()
        self.controller.move_tickets()

    def _end(self) -> None:
        for host in list(self.members.hosts.values()):
            host.link.send(Leave())

    def _lose_liar(self, identity: bytes, why: str) -> None:
        """Lose a host that was shut out; it may have left already."""
        host = self.members.hosts.get(identity)
        if host is not None:
            self._lose(host, why, is_believed=False)
        else:
            print(f"swarm: a host that has left {why}; it is let in no more", flush=True)

    def _lose(self, host: Host, why: str, is_believed: bool = True) -> None:
        """Give a host up: its workers have died. A host that is not believed is also shut out."""
        if self.members.hosts.get(host.identity) is not host:
            return
        why = printable(why[:MAX_SHOWN])
        self.members.remove(host, why)
        if not is_believed:
            self.members.shut_out.add(host.identity)
            host.link.send(Refused(why))
        for worker in host.engines.values():
            self.controller.give_up(worker, is_believed)
