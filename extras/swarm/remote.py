"""Workers on hosts, and the buffer that holds a batch until it is believed: records of a controller with hosts."""

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import numpy as np

from asyncrl.controller.buffer import SampleBuffer
from asyncrl.controller.workers import Worker, WorkerDied, Workers
from asyncrl.messages import LoadWeights, Probed, WeightsLoaded, decoded_lengths
from asyncrl.records import Ticket
from asyncrl.weights.transport import Announcement, Staged, Transport
from extras.swarm.wire import Fetch, Fetched


class RemoteProcess:
    """An engine of a host, with the calls of WorkerProcess. It knows the answers that are due."""

    exit_code = None

    def __init__(self, post: Callable[[object], None]):
        self._post = post
        self.started_at = time.monotonic()
        # answer and version -> shapes of the arrays in it
        self._due: dict[tuple[type, int], list[tuple[int, ...]]] = {}

    def send(self, message: object) -> None:
        """Queue a message; never waits."""
        match message:
            case Fetch(version):  # in place of one that is gone, if it has not come
                self._due = {
                    due: shapes for due, shapes in self._due.items() if due[0] is not Fetched
                }
                self._due[Fetched, version] = []
            case LoadWeights(version, _, probe):
                self._due[WeightsLoaded, version] = []
                if probe:
                    lengths = decoded_lengths(probe)
                    shapes = [(len(tokens) - 1,) for tokens in probe]
                    self._due[Probed, version] = shapes + [(2, length) for length in lengths]
        self._post(message)

    def check_answer(self, message: Fetched | WeightsLoaded | Probed) -> None:
        """Raise ValueError for an answer that is not due, or has wrong contents."""
        shapes = self._due.pop((type(message), message.version), None)
        if shapes is None:
            raise ValueError(
                f"{type(message).__name__} of version {message.version}, which it was not asked for"
            )
        if isinstance(message, WeightsLoaded):
            counts = vars(message.sampled).values()
            if not (0 <= message.pause_s < 1e6 and min(counts) >= 0 and max(counts) < 1e12):
                raise ValueError(f"an update of {message.pause_s:.4g} s with {message.sampled}")
        elif isinstance(message, Probed):
            arrays = [*message.logprobs, *message.decoded]
            if [scores.shape for scores in arrays] != shapes:
                raise ValueError("log-probs of a probe in other shapes than its tokens")
            if not all(
                scores.dtype == np.float32 and np.isfinite(scores).all() for scores in arrays
            ):
                raise ValueError("log-probs of a probe that are not finite float32")

    def stop(self, timeout_s: float) -> None:
        """Return at once, because a host ends its engines."""


@dataclass
class Lease:
    """A host's right to sample for a ticket; see leases.py."""

    began_at: float
    """Seconds of the dispatcher's clock."""
    num_moves: int = 0
    """Hosts that the ticket was taken from."""
    is_over: bool = False
    """The ticket has moved to another worker. The host still runs it, and its answer comes too late."""


@dataclass
class RemoteWorker(Worker):
    """An engine of a host that has joined. It fetches weights before it loads them, and may be some versions behind."""

    counts_as_attempt: bool = False
    refresh_lag: int = 0
    now: Callable[[], float] = time.monotonic
    scores_probe: bool = False
    """The worker scores the probe after an update. One worker of each host does."""
    staged: Staged | None = None
    """The snapshot that the host was told to fetch last."""
    leases: dict[int, Lease] = field(default_factory=dict)
    """One for each of its tickets, by id."""

    def connect(self, transport: Transport) -> None:
        """Connect the host to the transport that the worker was made with."""
        super().connect(self.transport)

    def is_behind(self, newest: Announcement) -> bool:
        """Return whether the worker must fetch the newest weights.

        It can be `refresh_lag` versions behind, unless it waits for newer ones. An evaluation needs the newest.
        """
        is_patient = (
            self.sent_version >= 0 and self.idle_reason != "version" and not newest.evaluate
        )
        return newest.version - self.sent_version >= max(1, self.refresh_lag if is_patient else 1)

    def can_load(self, announcement: Announcement) -> bool:
        """Return whether the worker can begin to fetch these weights."""
        return self.transport.is_kept(announcement.version)

    def load(self, announcement: Announcement) -> None:
        """Make the host fetch weights while the worker samples on. `load_fetched` follows."""
        self.loading = announcement
        self.staged = self.transport.staged(announcement.version)
        self.transport.acquire(self.staged)
        self.process.send(Fetch(announcement.version, self.staged.messages))

    def load_fetched(self) -> None:
        """Make the worker load the weights that have come to its host, also if there are newer ones."""
        self.send_update(self.staged.messages, self.loading.probe if self.scores_probe else ())

    def finish_loading(self) -> None:
        """Note that the host has read the weights."""
        self.transport.release(self.staged)
        self.loading = None

    def request_progress(self) -> None:
        """Return at once, because a resumed run samples the responses of hosts again."""

    def assign(self, ticket: Ticket) -> None:
        """Note that the worker has a ticket."""
        super().assign(ticket)
        self.leases[ticket.ticket_id] = Lease(self.now())

    @property
    def awaited(self) -> list[Ticket]:
        """Tickets of the worker that no other worker has."""
        return [ticket for ticket in super().awaited if not self.leases[ticket.ticket_id].is_over]

    def finish_ticket(self, ticket_id: int) -> None:
        """Note that the worker has ended a ticket."""
        super().finish_ticket(ticket_id)
        del self.leases[ticket_id]


class SwarmWorkers(Workers):
    """The workers of a node that listens: local ones, and workers of hosts that come and go."""

    num_joined = 0
    """Remote workers that there were."""
    alone_since: float | None = None
    """When the last worker left, or the run began without any, monotonic seconds."""
    pulled: Transport = Transport()
    """Transport of weights to hosts."""

    @property
    def any_starting(self) -> bool:
        """Return whether a worker is starting, or the run waits for a host; both have other timeouts."""
        return not any(self) or super().any_starting

    def join(self, worker: RemoteWorker) -> RemoteWorker:
        """Take in a worker of a host, and number it."""
        worker.index = self.num_workers + self.num_joined
        self.num_joined += 1
        self.by_index[worker.index] = worker
        return worker

    def replace(self, worker: Worker) -> None:
        """Start a dead local worker anew; remove a worker of a host."""
        if not isinstance(worker, RemoteWorker):
            super().replace(worker)
            return
        del self.by_index[worker.index]
        self.alone_since = time.monotonic()

    def check(self) -> None:
        """Raise also errors of snapshots, and WorkerDied if no worker was there for `join_timeout_s`."""
        super().check()
        self.pulled.check()
        self.alone_since = self.alone_since or time.monotonic()
        if not any(self) and time.monotonic() > self.alone_since + self.config.join_timeout_s:
            raise WorkerDied(
                f"no host has sampled for this run for {self.config.join_timeout_s:.0f} s, and it has no rollout "
                "worker of its own; join one sooner, or raise --join-timeout-s"
            )


class SwarmBuffer(SampleBuffer):
    """A buffer that allows hosts to be some versions behind."""

    @property
    def admission_version(self) -> int:
        """Oldest version that can start a new group."""
        return max(0, super().admission_version - self.node_config.swarm.refresh_lag)

    def holding_back(self) -> set[int]:
        """Return running groups that the next batch waits for, or that would make later groups expire."""
        group_ids = self.oldest_finished()
        groups = self.residents if group_ids is None else self.too_late_after(group_ids)
        return {group_id for group_id in groups if self.is_unfinished(group_id)}

    def groups_of(self, workers: Collection[int]) -> list[int]:
        """Return the resident groups with a trajectory of one of these workers."""
        return [
            group_id
            for group_id, resident in self.residents.items()
            if any(trajectory.worker in workers for trajectory in resident.members.values())
        ]
