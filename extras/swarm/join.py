"""The far end of a swarm: joins a run on another host, starts its engines, and is their way to the run.

    python rollout.py --join HOST:PORT --key runs/NAME/swarm.key [--rollout-tp GPUS]

Messages pass between the run's socket and the engines' pipes as they are, but for weights: those that an engine is to
fetch this host pulls, once for all its engines and while they sample on, and puts where they load them from.

When the run is out of reach, or has given this host up, the host joins again, with its engines and the weights
that it has; what it had of the run's tickets is void.
"""

import argparse
import contextlib
import functools
import os
import queue
import re
import signal
import socket
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import zmq
from zmq.utils.monitor import recv_monitor_message

from asyncrl import extras
from asyncrl.cluster.gpus import visible_gpus
from asyncrl.cluster.placement import WorkerSpec, available_cores, place
from asyncrl.cluster.processes import STOP_SIGNALS, ignore_signals
from asyncrl.cluster.worker_process import WorkerProcess
from asyncrl.config import Config, at_home
from asyncrl.messages import Abort, Connect, Finished, Probed, Ready, Stop, Tickets, Update, Updated
from asyncrl.user_code import user_code_names, with_absolute_paths
from asyncrl.weights.shm import ShmTransport
from asyncrl.weights.transport import Staged
from extras.swarm import link
from extras.swarm.puller import Puller
from extras.swarm.wire import (
    JOIN_S,
    PROTOCOL,
    TO_ENGINE,
    TO_HOST,
    Beat,
    Fetch,
    Fetched,
    Join,
    JoinAgain,
    JoinAt,
    Leave,
    Piece,
    Pull,
    Refused,
    Welcome,
    code_digest,
    read_key,
    user_code_digest,
)

MAX_HANDSHAKES = 10
"""Connections that may be closed before they are encrypted: by a wrong key all are, by a tunnel to nowhere those before
the run is there."""
STOP_S = 10.0
"""Time that the engines have to end by themselves."""
CONNECT_MS = 5000
FAILED_HANDSHAKES = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_AUTH


class Engine:
    """One engine of this host."""

    def __init__(self, process: WorkerProcess):
        self.process = process
        self.is_up = self.is_connected = False
        self.tickets: set[int] = set()
        """Those that the run still waits for."""
        self.wants: dict | None = None
        """What it was told to fetch."""
        self.fetched: Staged | None = None
        """What has come for it, until it is told to load it."""
        self.loading: deque[tuple[Staged, bool]] = deque()
        """What it was told to load, and whether the run waits for it to say so."""
        self.probes: set[int] = set()
        """Versions under which the run waits for it to score the probe."""

    def forget_run(self) -> Staged | None:
        """Give up all that the run asked for. Returns weights that had come for it."""
        self.process.send(Abort(sorted(self.tickets)))
        self.tickets.clear()
        self.probes.clear()
        self.wants, fetched, self.fetched = None, self.fetched, None
        self.loading = deque((staged, False) for staged, _ in self.loading)
        return fetched


class JoinedHost:
    """This host, while it samples for a run on another host."""

    def __init__(
        self,
        address: str,
        key_path: str,
        main: Callable,
        folder: Path,
        rollout_tp: int | None = None,
    ):
        """`main(spec, connection)` is what the engines' processes run; logs and the model's files go to `folder`; an
        engine has `rollout_tp` GPUs, by default as many as the run's own."""
        self.address, self.main, self.folder, self.rollout_tp = address, main, folder, rollout_tp
        self.engines: list[Engine] = []
        self.puller: Puller | None = None
        self.transport: ShmTransport | None = None
        self._keys = read_key(key_path)
        self._link = link.Link((*TO_ENGINE, *TO_HOST), self._send_frames)
        self._context = zmq.Context()
        self._socket: zmq.Socket | None = None
        self._welcome: Welcome | None = None
        self._has_joined = False
        # digest of what engines can load, and where it is
        self._here: tuple[str, Staged] | None = None
        self._from_engines: queue.SimpleQueue = queue.SimpleQueue()
        self._wake, self._threads = os.eventfd(0, os.EFD_NONBLOCK), ThreadPoolExecutor(64)
        self._joined_at = time.monotonic()
        self._asked: int | None = None  # version of which a piece is due
        self._num_failed = 0  # handshakes
        self._is_stopped = False

    # Its connection

    def _join(self, address: str | None = None) -> None:
        """Ask to be let in, at the run's address or another, over a new connection: one that was lost may have lost
        messages."""
        self._leave()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.curve_serverkey, self._socket.curve_publickey, self._socket.curve_secretkey = (
            self._keys
        )
        self._socket.set(zmq.LINGER, 1000)
        # no send ever waits: what piles up goes with the connection after SILENCE_S
        self._socket.set(zmq.SNDHWM, 0)
        self._socket.set(zmq.CONNECT_TIMEOUT, CONNECT_MS)
        self._monitor = self._socket.get_monitor_socket(FAILED_HANDSHAKES)
        self._socket.connect(f"tcp://{address or self.address}")
        self._has_joined, self._asked = False, None
        self._joined_at = time.monotonic()
        device = "cuda" if visible_gpus() else "cpu"
        self._link.send(Join(PROTOCOL, code_digest(), device, socket.gethostname(), time.time()))

    def _leave(self) -> None:
        for engine in self.engines:
            if (fetched := engine.forget_run()) is not None:
                self.transport.release(fetched)
        if self._socket is not None:
            self._link.send(Leave())
            self._socket.disable_monitor()
            self._socket.close()

    def _ask(self, pull: Pull) -> None:
        self._asked = pull.version
        self._link.send(pull)

    def _send_frames(self, frames: list[bytes]) -> None:
        # one that was refused by its key has no connection any more
        with contextlib.suppress(zmq.Again):
            self._socket.send_multipart(frames, flags=zmq.DONTWAIT)

    def serve(self) -> str:
        """Sample until the run ends. Returns why it ended.

        Raises ValueError if the run refuses this host, or was never reached, and RuntimeError if an engine died.
        """
        self._join()
        while not self._is_stopped:
            poller = zmq.Poller()
            poller.register(self._socket, zmq.POLLIN)
            poller.register(self._wake, zmq.POLLIN)
            if self._wake in dict(poller.poll(1000 * link.BEAT_S)):
                os.eventfd_read(self._wake)
                self._pass_on()
                if self.puller is not None and self.puller.collect():
                    self._look_for_weights()
            while self._socket.poll(0):
                why = self._act(*self._link.read(self._socket.recv_multipart()))
                if why is not None:
                    return why
            if (why := self._keep_in_touch()) is not None:
                return why
        return "stopped here"

    def stop(self) -> None:
        """Have `serve` return soon; a signal's handler may call this.

        It only asks: an exception there could end a message, or the start of an engine, in its middle.
        """
        self._is_stopped = True
        os.eventfd_write(self._wake, 1)

    def _keep_in_touch(self) -> str | None:
        """Give a sign of life, and join again if there was none from the run. Returns why to end, if it is time to."""
        if self._welcome is None:
            self._check_handshakes()
            if self._link.silent_s > JOIN_S:
                raise ValueError(
                    f"--join {self.address}: no answer in {JOIN_S:.0f} s; is the run there?"
                )
        if self._has_joined and self._link.is_silent:
            print(
                f"no word from the run for {self._link.silent_s:.0f} s: trying to reach it again",
                flush=True,
            )
            self._join()
        elif not self._has_joined and time.monotonic() > self._joined_at + JOIN_S:
            self._join()
        else:
            self._link.beat()  # before a welcome that takes long, too
        if (
            self._welcome is not None
            and self._link.silent_s > self._welcome.options["join_timeout_s"]
        ):
            return (
                f"the run was out of reach for {self._link.silent_s:.0f} s (its --join-timeout-s)"
            )
        return None

    def _check_handshakes(self) -> None:
        """Raise ValueError if the run's side has another key."""
        while self._monitor.poll(0):
            refused = (
                recv_monitor_message(self._monitor)["event"] == zmq.EVENT_HANDSHAKE_FAILED_AUTH
            )
            self._num_failed += MAX_HANDSHAKES if refused else 1
        if self._num_failed >= MAX_HANDSHAKES:
            raise ValueError(
                f"--join {self.address}: what listens there has another key, or is no run; see --key"
            )

    def _act(self, engine: int, message: object) -> str | None:
        """Act on what the run says. Returns why this host is to leave, if it is."""
        match message:
            case Leave():
                return "the run has ended"
            case Refused(reason):
                raise ValueError(f"the run at {self.address} refuses this host: {reason}")
            case JoinAgain():
                self._join()
            case JoinAt(address):
                self._join(address)
            case Welcome():
                self._on_welcome(message)
            case Piece():
                self._asked = None if message.version == self._asked else self._asked
                if self.puller.take(message):
                    self._look_for_weights()
            case Beat():
                pass
            case _:
                self._tell(self.engines[engine], message)
        return None

    def _on_welcome(self, welcome: Welcome) -> None:
        if self._welcome is None:
            self._check_user_code(welcome)
            self._welcome = welcome
            self._start_engines()
        elif welcome != self._welcome:
            raise ValueError(f"another run listens at {self.address} now; join that one anew")
        self._has_joined = True
        engines = f"{len(self.engines)} engine" + "s" * (len(self.engines) > 1)
        print(f"joined {self.address}: {engines}, logs in {self.folder}", flush=True)
        for index, engine in enumerate(self.engines):
            if engine.is_up:
                self._link.send(Ready(0.0), index)

    def _check_user_code(self, welcome: Welcome) -> None:
        """Raise ValueError if the files of user code here are not those of the run."""
        texts = user_code_names(with_absolute_paths(Config.from_dict(welcome.options), Path.cwd()))
        with contextlib.suppress(OSError):
            if user_code_digest(texts) == welcome.user_code_digest:
                return
        raise ValueError(
            f"{', '.join(texts)}: not what the run has, or imports; copy runs/NAME/code of the run here"
        )

    # Its engines

    def _start_engines(self) -> None:
        """Start an engine for each device, or as many as they share."""
        for name, content in self._welcome.model_files.items():
            (self.folder / Path(name).name).write_bytes(content)
        # as its devices are
        options = self._welcome.options | {"num_rollout_workers": None, "weight_sync": "auto"}
        options["timeout_s"] /= 2  # an engine that stands still is to end before the run does
        options |= {"rollout_tp": self.rollout_tp} if self.rollout_tp else {}
        config = with_absolute_paths(Config.from_dict(options), Path.cwd())
        workers = place(config, len(visible_gpus()), available_cores(), 0).workers
        planning = extras.find("planning")
        if planning is not None and config.rollout_tp > 1:
            planning.check_tp(planning.read_shape(str(self.folder)), config.rollout_tp)
        for index, worker in enumerate(workers):
            log = str(self.folder / f"worker_{index}.log")
            spec = WorkerSpec(config, worker, str(self.folder), "shm", log, str(self.folder))
            hear = functools.partial(self._hear, index)
            self.engines.append(Engine(WorkerProcess(spec, self.main, hear, self._threads)))

    def _hear(self, engine: int, message: object) -> None:
        self._from_engines.put((engine, message))
        os.eventfd_write(self._wake, 1)

    def _tell(self, engine: Engine, message: object) -> None:
        """Give an engine what the run says to it; weights it loads from here."""
        match message:
            case Connect(init_info):
                self._connect(engine, init_info)
            case Fetch(_, infos):
                engine.wants = infos[0]
                self._look_for_weights()
            case Update(version, _, probe):
                staged, engine.fetched = engine.fetched, None
                engine.loading.append((staged, True))
                engine.probes |= {version} if probe else set()
                engine.process.send(Update(version, staged.messages, probe))
            case Tickets(tickets):
                engine.tickets |= {ticket.ticket_id for ticket in tickets}
                engine.process.send(message)
            case _:
                engine.process.send(message)

    def _connect(self, engine: Engine, init_info: dict) -> None:
        if self.puller is None:
            wake = functools.partial(os.eventfd_write, self._wake, 1)
            self.puller = Puller(init_info, self._ask, wake)
            self.transport = ShmTransport(self.puller.specs)
        if not engine.is_connected:
            engine.is_connected = True
            engine.process.send(Connect(self.transport.init_info()))

    def _look_for_weights(self) -> None:
        """Let engines know of weights that have come, and have the next come that any of them wants, oldest first."""
        here = self.puller.here
        if here is not None and (self._here is None or self._here[0] != here.digest):
            if not self.transport.reserve():
                return  # until an engine has loaded what is in one
            self._here = here.digest, self.transport.stage(here.version, self.puller.parameters())
            self.transport.announce(self._here[1])
        for index, engine in enumerate(self.engines):
            if engine.wants and here is not None and engine.wants["digest"] == here.digest:
                # not that of what is here: versions may be equal to the bit
                version = engine.wants["version"]
                engine.wants, engine.fetched = None, self._here[1]
                self.transport.acquire(engine.fetched)
                self._link.send(Fetched(version), index)
        wanted = [engine.wants for engine in self.engines if engine.wants is not None]
        if wanted and (self._asked is None or self.puller.wanted not in wanted):
            self.puller.want(min(wanted, key=lambda info: info["version"]))

    def _pass_on(self) -> None:
        """Send on what engines have said."""
        while not self._from_engines.empty():
            index, message = self._from_engines.get()
            engine = self.engines[index]
            match message:
                case None:
                    engine.process.stop()
                    raise RuntimeError(engine.process.death_report())
                case Ready():
                    engine.is_up = True
                case Updated():
                    staged, is_due = engine.loading.popleft()
                    self.transport.release(staged)
                    message = message if is_due else None
                    self._look_for_weights()
                case Probed(version):
                    message = message if version in engine.probes else None
                    engine.probes.discard(version)
                case Finished(trajectories, activity):
                    due = [t for t in trajectories if t.ticket_id in engine.tickets]
                    engine.tickets -= {t.ticket_id for t in due}
                    message = Finished(due, activity) if due else None
            if message is not None and self._has_joined:
                self._link.send(message, index)

    def close(self) -> None:
        """Leave the run and end all engines; none is left when this returns."""
        self._leave()
        for engine in self.engines:
            engine.process.send(Stop())
        deadline = time.monotonic() + STOP_S
        for engine in self.engines:
            engine.process.stop(max(0.0, deadline - time.monotonic()) if engine.is_up else 0.0)
        self._threads.shutdown()
        self._context.destroy()


def main(worker_main: Callable) -> None:
    """Read the command line of `rollout.py --join` and serve that run; engines run `worker_main(spec, connection)`."""
    parser = argparse.ArgumentParser(description="Sample for a run on another host.")
    parser.add_argument(
        "--join", required=True, metavar="HOST:PORT", help="where the run listens (its --listen)"
    )
    parser.add_argument(
        "--key", required=True, metavar="FILE", help="runs/NAME/swarm.key of the run"
    )
    parser.add_argument(
        "--rollout-tp",
        type=int,
        metavar="GPUS",
        help="of an engine here; by default as the run's own",
    )
    given = parser.parse_args(at_home(sys.argv[1:]))
    match = re.fullmatch(r"(?a)[\w.-]+:(\d{1,5})", given.join)
    if match is None or not 0 < int(match[1]) < 2**16:
        sys.exit(f"error: --join must be HOST:PORT, as 127.0.0.1:7733, got {given.join!r}")
    if given.rollout_tp is not None and given.rollout_tp < 1:
        sys.exit(f"error: --rollout-tp must be at least 1, got {given.rollout_tp}")
    with tempfile.TemporaryDirectory(prefix="swarm-", ignore_cleanup_errors=True) as folder:
        try:
            host = JoinedHost(given.join, given.key, worker_main, Path(folder), given.rollout_tp)
            for number in STOP_SIGNALS:
                signal.signal(number, lambda *_: host.stop())
            try:
                print(f"left: {host.serve()}")
            finally:
                ignore_signals()
                host.close()
        except (ValueError, RuntimeError, OSError) as error:
            sys.exit(f"error: {error}")
