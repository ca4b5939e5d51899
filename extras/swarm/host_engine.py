"""An engine of this host, and the answers that the run waits for."""

import functools
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from asyncrl.cluster.gpus import visible_gpus
from asyncrl.cluster.placement import WorkerSpec, available_cores, place
from asyncrl.cluster.worker_process import WorkerProcess
from asyncrl.config import Config
from asyncrl.messages import (
    Abort,
    Connect,
    Finished,
    LoadWeights,
    Probed,
    Ready,
    Tickets,
    WeightsLoaded,
)
from asyncrl.user_code import with_absolute_paths
from asyncrl.weights.transport import Staged, Transport
from extras.swarm.wire import Welcome


class HostEngine:
    """One engine of this host. The run waits for its answers until the host joins anew."""

    def __init__(self, process: WorkerProcess):
        self.process = process
        self.is_up = False
        self.wanted: dict | None = None
        """Update info of the weights that the run told it to fetch."""
        self.fetched: Staged | None = None
        """Weights that have come for it, until it is told to load them."""
        self._transport: Transport | None = None  # known once the engine is connected
        self._tickets: set[int] = set()
        self._aborted: set[int] = set()
        """Tickets of a run that this host left, still without an answer of the engine."""
        self._held: dict[int, list[Tickets | Abort]] = {}
        """Messages on new tickets whose ids such tickets have; a run that is resumed gives ids again."""
        self._probes: set[int] = set()  # versions
        # weights that it was told to load, and whether the run waits for them
        self._loading: deque[tuple[Staged, bool]] = deque()

    def forget_run(self) -> None:
        """Give up all that the run has asked for."""
        self.process.send(Abort(sorted(self._tickets)))
        self._aborted |= self._tickets
        self._tickets.clear()
        self._held.clear()
        self._probes.clear()
        if self.fetched is not None:
            self._transport.release(self.fetched)
        self.wanted = self.fetched = None
        self._loading = deque((staged, False) for staged, _ in self._loading)

    def connect(self, transport: Transport) -> None:
        """Connect the engine to the buffers of this host, once."""
        if self._transport is None:
            self._transport = transport
            self.process.send(Connect(transport.init_info()))

    def tell(self, message: object) -> None:
        """Send the engine a message of the run. Weights are loaded from this host."""
        match message:
            case LoadWeights(version, _, probe):
                self._loading.append((self.fetched, True))
                message = LoadWeights(version, self.fetched.messages, probe)
                self.fetched = None
                self._probes |= {version} if probe else set()
            case Tickets(tickets):
                for ticket in tickets:
                    if ticket.ticket_id in self._aborted:
                        self._held[ticket.ticket_id] = [Tickets([ticket])]
                started = [ticket for ticket in tickets if ticket.ticket_id not in self._aborted]
                self._tickets |= {ticket.ticket_id for ticket in started}
                message = Tickets(started)
            case Abort(ticket_ids):
                for ticket_id in self._held.keys() & set(ticket_ids):
                    self._held[ticket_id].append(Abort([ticket_id]))
                message = Abort([number for number in ticket_ids if number not in self._held])
        self.process.send(message)

    def hear(self, message: object) -> object | None:
        """Act on the engine's message. Return the part that the run waits for, or None.

        Raises RuntimeError if the message is None: the engine has died.
        """
        match message:
            case None:
                self.process.stop()
                raise RuntimeError(self.process.death_report())
            case Ready():
                self.is_up = True
            case WeightsLoaded():
                staged, is_awaited = self._loading.popleft()
                self._transport.release(staged)
                return message if is_awaited else None
            case Probed(version):
                is_awaited = version in self._probes
                self._probes.discard(version)
                return message if is_awaited else None
            case Finished(trajectories, activity):
                awaited = [t for t in trajectories if t.ticket_id in self._tickets]
                self._tickets -= {t.ticket_id for t in awaited}
                for ticket_id in self._aborted & {t.ticket_id for t in trajectories}:
                    self._aborted.remove(ticket_id)
                    for held in self._held.pop(ticket_id, ()):
                        self.tell(held)
                return Finished(awaited, activity) if awaited else None
        return message


def start_engines(
    welcome: Welcome,
    folder: Path,
    rollout_tp: int | None,
    main: Callable,
    hear: Callable[[int, object], None],
    threads: ThreadPoolExecutor,
) -> list[HostEngine]:
    """Start an engine for each device, or as many as share the CPU.

    An engine has `rollout_tp` GPUs, by default as many as the run's own. Its process runs `main(spec, connection)`, and
    `hear(engine, message)` gets its messages in a thread. Logs and the model's files go to `folder`.
    Raises ValueError if the devices or the model do not fit the options.
    """
    for name, content in welcome.model_files.items():
        (folder / Path(name).name).write_bytes(content)
    # as its devices are
    options = welcome.options | {"num_rollout_workers": None, "weight_sync": "auto"}
    options["timeout_s"] /= 2  # an engine that hangs is to end before the run does
    if rollout_tp is not None:
        options["rollout_tp"] = rollout_tp
    config = with_absolute_paths(Config.from_dict(options), Path.cwd())
    workers = place(config, len(visible_gpus()), available_cores(), 0).workers
    engines = []
    for index, worker in enumerate(workers):
        log = str(folder / f"worker_{index}.log")
        spec = WorkerSpec(config, worker, str(folder), "shm", log, str(folder))
        process = WorkerProcess(spec, main, functools.partial(hear, index), threads)
        engines.append(HostEngine(process))
    return engines
