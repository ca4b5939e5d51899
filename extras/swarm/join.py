"""The far end of a swarm: joins a run on another host, and samples for it with the engines of this host.

    python rollout.py --join HOST:PORT --key runs/NAME/swarm.key [--rollout-tp GPUS]

| file | its part at the host's end |
|---|---|
| run_connection.py, link.py, wire.py | the connection to the run; messages as bytes |
| host_engine.py | an engine, and the answers that the run waits for |
| host_weights.py, puller.py, delta.py | weights: pulled once for all engines, while they sample |

Messages pass between the run and the engines unchanged, except about weights. A run can be out of reach, or can have
given this host up. Then the host joins again, with its engines and weights, and its tickets are void.
"""

import contextlib
import os
import queue
import re
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import tyro
import zmq

from asyncrl.cluster.fingerprint import digest
from asyncrl.cluster.processes import STOP_SIGNALS, ignore_signals
from asyncrl.config import Config, with_home_folder
from asyncrl.messages import Connect, Ready, Stop, WeightsLoaded
from asyncrl.user_code import files, is_user_code, user_code_names, with_absolute_paths
from extras.swarm import link
from extras.swarm.host_engine import HostEngine, start_engines
from extras.swarm.host_weights import HostWeights
from extras.swarm.run_connection import RunConnection
from extras.swarm.wire import (
    Beat,
    Fetch,
    Fetched,
    JoinAgain,
    JoinAt,
    Leave,
    Piece,
    Refused,
    Welcome,
)

STOP_S = 10.0
"""Time that the engines have to end, seconds."""


@dataclass(frozen=True)
class Arguments:
    """Sample for a run on another host."""

    join: str
    """HOST:PORT where the run listens (its --listen)."""
    key: str
    """runs/NAME/swarm.key of the run."""
    rollout_tp: int | None = None
    """GPUs of an engine here; unset, as the run's own."""
    task: str | None = None
    """Program, as agent:COMMAND, or verifiers:NAME, that the run can start on this host."""


class JoinedHost:
    """This host, while it samples for a run on another host."""

    def __init__(self, given: Arguments, main: Callable, folder: Path):
        """See start_engines for `main` and `folder`. Raises ValueError if the key cannot be read."""
        self.folder = folder
        self.connection = RunConnection(given.join, given.key)
        self.engines: list[HostEngine] = []
        self.weights: HostWeights | None = None
        """Known once the run has told how its weights lie."""
        self._given = given
        self._main = main
        self._welcome: Welcome | None = None
        self._from_engines: queue.SimpleQueue = queue.SimpleQueue()
        self._wake_event, self._threads = os.eventfd(0, os.EFD_NONBLOCK), ThreadPoolExecutor(64)
        self._is_stopped = False

    def serve(self) -> str:
        """Sample until the run ends. Return why it ended.

        Raises ValueError if the run refuses this host, or was never reached, and RuntimeError if an engine died.
        """
        self._join()
        while not self._is_stopped:
            poller = zmq.Poller()
            poller.register(self.connection.socket, zmq.POLLIN)
            poller.register(self._wake_event, zmq.POLLIN)
            if self._wake_event in dict(poller.poll(1000 * link.BEAT_S)):
                os.eventfd_read(self._wake_event)
                self._hear_engines()
                if self.weights is not None and self.weights.puller.collect():
                    self._supply_weights()
            for engine, message in self.connection.receive():
                why = self._act(engine, message)
                if why is not None:
                    return why
            why = self._keep_in_touch()
            if why is not None:
                return why
        return "stopped here"

    def stop(self) -> None:
        """Make `serve` return soon; a signal's handler can call this.

        It only asks: an exception there could end a message, or the start of an engine, in its middle.
        """
        self._is_stopped = True
        self._wake()

    def close(self) -> None:
        """Leave the run and end all engines before this returns."""
        self.connection.leave()
        for engine in self.engines:
            engine.process.send(Stop())
        deadline = time.monotonic() + STOP_S
        for engine in self.engines:
            engine.process.stop(max(0.0, deadline - time.monotonic()) if engine.is_up else 0.0)
        self._threads.shutdown()
        self.connection.close()

    def _wake(self) -> None:
        os.eventfd_write(self._wake_event, 1)

    # The run

    def _join(self, address: str | None = None) -> None:
        for engine in self.engines:
            engine.forget_run()
        if self.weights is not None:
            self.weights.puller.forget_request()
        self.connection.join(address)

    def _keep_in_touch(self) -> str | None:
        """Give a sign of life, and join again if the run is silent. Return the reason to end, or None."""
        if self._welcome is None:
            self.connection.check_first_answer()
        silent_s = self.connection.link.silent_s
        if self.connection.is_lost:
            if self.connection.has_joined:
                why = f"no word from the run for {silent_s:.0f} s"
                print(f"{why}: trying to reach it again", flush=True)
            self._join()
        else:
            self.connection.link.beat()  # before a welcome that takes long, too
        if self._welcome is not None and silent_s > self._welcome.options["join_timeout_s"]:
            return f"the run was out of reach for {silent_s:.0f} s (its --join-timeout-s)"
        return None

    def _act(self, engine: int, message: object) -> str | None:
        """Act on a message of the run. Return why this host is to leave, or None."""
        address = self.connection.address
        match message:
            case Leave():
                return "the run has ended"
            case Refused(reason):
                raise ValueError(f"the run at {address} refuses this host: {reason}")
            case JoinAgain():
                self._join()
            case JoinAt(address):
                self._join(address)
            case Welcome():
                self._on_welcome(message)
            case Piece():
                if self.weights.puller.take(message):
                    self._supply_weights()
            case Beat():
                pass
            case Connect(init_info):
                if self.weights is None:
                    self.weights = HostWeights(init_info, self.connection.link.send, self._wake)
                self.engines[engine].connect(self.weights.transport)
            case Fetch(_, infos):
                self.engines[engine].wanted = infos[0]
                self._supply_weights()
            case _:
                self.engines[engine].tell(message)
        return None

    def _on_welcome(self, welcome: Welcome) -> None:
        address = self.connection.address
        if self._welcome is None:
            check_program(welcome, self._given.task)
            check_user_code(welcome)
            self._welcome = welcome
            self.engines = start_engines(
                welcome, self.folder, self._given.rollout_tp, self._main, self._hear, self._threads
            )
        elif welcome != self._welcome:
            raise ValueError(f"another run listens at {address} now; join that one anew")
        self.connection.has_joined = True
        engines = f"{len(self.engines)} engine" + "s" * (len(self.engines) > 1)
        print(f"joined {address}: {engines}, logs in {self.folder}", flush=True)
        for index, engine in enumerate(self.engines):
            if engine.is_up:
                self.connection.link.send(Ready(0.0), index)

    # Its engines

    def _hear(self, engine: int, message: object) -> None:
        self._from_engines.put((engine, message))
        self._wake()

    def _hear_engines(self) -> None:
        """Send the run the messages of engines that it waits for."""
        while not self._from_engines.empty():
            index, message = self._from_engines.get()
            answer = self.engines[index].hear(message)
            if isinstance(message, WeightsLoaded):
                self._supply_weights()
            if answer is not None and self.connection.has_joined:
                self.connection.link.send(answer, index)

    def _supply_weights(self) -> None:
        for index, version in self.weights.supply(self.engines):
            self.connection.link.send(Fetched(version), index)


def check_program(welcome: Welcome, allowed_task: str | None) -> None:
    """Raise ValueError if the run would start a program here that this host's command line does not name."""
    config = Config.from_dict(welcome.options)
    is_program = config.is_agent and not is_user_code(config.task)
    if is_program and config.task != allowed_task:
        raise ValueError(
            f"the run would start a program on this host; if you allow it, add --task {shlex.quote(config.task)}"
        )


def check_user_code(welcome: Welcome) -> None:
    """Raise ValueError if user code here differs from the run's."""
    names = user_code_names(with_absolute_paths(Config.from_dict(welcome.options), Path.cwd()))
    with contextlib.suppress(OSError):
        if digest(files(names)) == welcome.user_code_digest:
            return
    raise ValueError(
        f"{', '.join(names)}: not what the run has, or imports; copy runs/NAME/code of the run here"
    )


def main(worker_main: Callable) -> None:
    """Read the command line of `rollout.py --join` and serve that run; engines run `worker_main(spec, connection)`."""
    given = tyro.cli(Arguments, args=with_home_folder(sys.argv[1:]))
    match = re.fullmatch(r"(?a)[\w.-]+:(\d{1,5})", given.join)
    if match is None or not 0 < int(match[1]) < 2**16:
        sys.exit(f"error: --join must be HOST:PORT, as 127.0.0.1:7733, got {given.join!r}")
    with tempfile.TemporaryDirectory(prefix="swarm-", ignore_cleanup_errors=True) as folder:
        try:
            host = JoinedHost(given, worker_main, Path(folder))
            for number in STOP_SIGNALS:
                signal.signal(number, lambda *_: host.stop())
            try:
                print(f"left: {host.serve()}")
            finally:
                ignore_signals()
                host.close()
        except (ValueError, RuntimeError, OSError) as error:
            sys.exit(f"error: {error}")
