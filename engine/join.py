"""The far end of a swarm: joins a run elsewhere, starts its engines, and is their way to the run.

    python rollout.py --join HOST:PORT --key runs/NAME/swarm.key

Messages pass between the run's socket and the engines' pipes as they are, but for weights: of an update this machine
first pulls the snapshot, while its engines sample on, and then tells them to load it from host memory.
"""

import os
import queue
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import zmq

from cluster.fingerprint import code_digest
from cluster.gpus import visible_gpus
from cluster.placement import WorkerSpec, available_cores, place
from cluster.worker_process import WorkerProcess
from config import Config
from data.messages import (
    PROTOCOL,
    TO_ENGINE,
    TO_MACHINE,
    Beat,
    Connect,
    Gone,
    Join,
    Leave,
    Piece,
    Refused,
    Stop,
    Update,
    Updated,
    Welcome,
)
from data.models import folder_digest, resolve_model
from data.wire import BEAT_S, JOIN_S, MACHINE, SILENCE_S, Codec, read_key
from weights.puller import Puller
from weights.shm import ShmTransport
from weights.transport import Staged

STOP_S = 10.0
"""Time that the engines have to end by themselves."""


class JoinedMachine:
    """This machine, while it samples for a run elsewhere."""

    def __init__(self, connection: zmq.Socket, codec: Codec):
        self.connection, self.codec = connection, codec
        self.engines: list[WorkerProcess] = []
        self.puller: Puller | None = None
        self.transport: ShmTransport | None = None
        self._pending: dict[int, Update] = {}  # engine -> update that waits for its weights
        self._loading: dict[int, Staged] = {}
        self._from_engines: queue.SimpleQueue = queue.SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)

    def start(self, config: Config, model_path: str, main: Callable, folder: Path, threads: ThreadPoolExecutor) -> None:
        """Start an engine for each device; `main(spec, connection)` is what their processes run."""
        placement = place(config, len(visible_gpus()), available_cores(), 0)
        for index, worker in enumerate(placement.workers):
            log = str(folder / f"worker_{index}.log")
            spec = WorkerSpec(config, worker, model_path, "shm", log, str(folder))
            self.engines.append(WorkerProcess(spec, main, lambda m, i=index: self._heard(i, m), threads))

    def _heard(self, engine: int, message: object) -> None:
        self._from_engines.put((engine, message))
        os.eventfd_write(self._wake, 1)

    def serve(self) -> str:
        """Pass messages until the run ends, or is out of reach. Returns why it ended; raises RuntimeError for an engine
        that died."""
        poller, beaten_at, heard_at = zmq.Poller(), 0.0, time.monotonic()
        poller.register(self.connection, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        while True:
            ready = dict(poller.poll(1000 * BEAT_S / 2))
            if self._wake in ready:
                os.eventfd_read(self._wake)
                self._pass_on()
            while self.connection.poll(0):
                heard_at = time.monotonic()
                engine, *frames = self.connection.recv_multipart()
                if (why := self._act(engine, self.codec.decode(*frames))) is not None:
                    return why
            if time.monotonic() > beaten_at + BEAT_S:
                beaten_at = time.monotonic()
                self.send(MACHINE, Beat())
            if time.monotonic() > heard_at + SILENCE_S:
                return f"the run was silent for {SILENCE_S:.0f} s"

    def send(self, engine: bytes, message: object) -> None:
        """Send a message of an engine, or of the machine."""
        self.connection.send_multipart([engine, *self.codec.encode(message)])

    def _pass_on(self) -> None:
        """Send on what engines have said."""
        while not self._from_engines.empty():
            engine, message = self._from_engines.get()
            if message is None:
                raise RuntimeError(self.engines[engine].death_report())
            self.send(str(engine).encode(), message)
            if isinstance(message, Updated):
                self.transport.release(engine, self._loading.pop(engine))
                self._load()

    def _act(self, engine: bytes, message: object) -> str | None:
        """Act on what the run says. Returns why this machine is to leave, if it is."""
        match message:
            case Beat():
                pass
            case Leave():
                return "the run has ended"
            case Refused(reason):
                return f"the run lets this machine in no more: {reason}"
            case Piece():
                if self.puller.take(message):
                    self._load()
            case Gone():
                self.puller.wanted = None  # of an announcement that is over
            case Connect(init_info):
                if self.puller is None:
                    self.puller = Puller(init_info, lambda pull: self.send(MACHINE, pull))
                    self.transport = ShmTransport(self.puller.specs)
                self.engines[int(engine)].send(Connect(self.transport.init_info()))
            case Update():
                self._pending[int(engine)] = message
                self._load()
            case _:
                self.engines[int(engine)].send(message)
        return None

    def _load(self) -> None:
        """Have engines load what they are to load, if it is here; else pull it."""
        here = {e: u for e, u in self._pending.items() if u.version == self.puller.version and e not in self._loading}
        if here and self.transport.free_buffer() is not None:
            staged = self.transport.stage(self.puller.version, self.puller.parameters())
            self.transport.announce(staged)
            for engine, update in here.items():
                self.transport.acquire(engine, staged)
                self._loading[engine] = staged
                self.engines[engine].send(Update(update.version, staged.messages, update.probe))
                del self._pending[engine]
        missing = [u for u in self._pending.values() if u.version != self.puller.version]
        if missing and self.puller.wanted is None:
            self.puller.want(max(missing, key=lambda u: u.version).update_infos[0])

    def stop(self) -> None:
        """End all engines; none is left when this returns."""
        for engine in self.engines:
            engine.send(Stop())
        deadline = time.monotonic() + STOP_S
        for engine in self.engines:
            engine.stop(max(0.0, deadline - time.monotonic()))


def join(address: str, key_path: str, main: Callable) -> str:
    """Sample for the run that listens at `address` until it ends. Returns why it ended.

    Raises ValueError if the run cannot be reached, or refuses this machine.
    """
    keys, context = read_key(key_path), zmq.Context()
    connection = context.socket(zmq.DEALER)
    connection.curve_serverkey, connection.curve_publickey, connection.curve_secretkey = keys
    connection.set(zmq.LINGER, 1000)
    connection.connect(f"tcp://{address}")
    codec, threads = Codec((*TO_ENGINE, *TO_MACHINE)), ThreadPoolExecutor()
    machine = JoinedMachine(connection, codec)
    try:
        config, model_path = _be_welcomed(machine, address)
        with TemporaryDirectory(prefix="swarm-", ignore_cleanup_errors=True) as folder:
            try:
                machine.start(config, model_path, main, Path(folder), threads)
                print(f"joined {address}: {len(machine.engines)} engines start, logs in {folder}", flush=True)
                return machine.serve()
            finally:
                machine.send(MACHINE, Leave())
                machine.stop()
                threads.shutdown()
    finally:
        context.destroy()


def _be_welcomed(machine: JoinedMachine, address: str) -> tuple[Config, str]:
    """Ask to be let in. Returns the options of the run and the folder of its model here."""
    machine.send(MACHINE, Join(PROTOCOL, code_digest(), socket.gethostname(), 1))
    if not machine.connection.poll(1000 * JOIN_S):
        raise ValueError(f"--join {address}: no answer in {JOIN_S:.0f} s; is the run there, and is --key of this run?")
    match machine.codec.decode(*machine.connection.recv_multipart()[1:]):
        case Welcome(options, model_digest):
            options = {name: tuple(v) if isinstance(v, list) else v for name, v in options.items()}
            config = Config(**{**options, "num_rollout_workers": None, "weight_sync": "auto"})  # as its devices are
            model_path = resolve_model(config.model, config.task)
            if (found := folder_digest(model_path)) != model_digest:
                raise ValueError(f"--model {config.model} here ({found}) is not that of the run ({model_digest})")
            return config, model_path
        case Refused(reason):
            raise ValueError(f"the run at {address} refused this machine: {reason}")
        case other:
            raise ValueError(f"the run at {address} answered {type(other).__name__}")
