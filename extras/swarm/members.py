"""The hosts that have joined a node of a run, and the hosts that are shut out."""

import itertools
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from asyncrl.controller.workers import Worker
from asyncrl.records import Trajectory
from asyncrl.runlog.metrics import Measured
from extras.swarm.link import Link

COUNTS = ("joins", "leaves", "late", "mb_sent", "mb_received")
"""Counts since the start of the run: hosts that joined and left; trajectories of hosts that had left; 10⁶ bytes sent
and received."""
MAX_FAILED = 16
"""Trajectories of one host that can fail one after the other."""
MAX_NAMED = 16
"""Hosts that have metrics under their names. Events report all hosts."""


@dataclass(eq=False)
class Host:
    """A host that has joined, or asks to."""

    identity: bytes
    """Name of its connection."""
    link: Link
    name: str = "a stranger"
    """Its host name, with a number if another host has the same."""
    clock_ahead_s: float = 0.0
    engines: dict[int, Worker] = field(default_factory=dict)
    """Engines that are up, by their number on the host."""
    is_pulling: bool = False
    num_failed: int = 0
    """Trajectories that failed since one did not."""
    counts: Counter[str] = field(default_factory=Counter)
    """Tokens, trajectories and their lags since the last report."""

    def adopt(self, trajectory: Trajectory, worker: int, newest_version: int) -> Trajectory:
        """Count a trajectory. Return it with its worker's number here, and with times by the clock here.

        Raises ValueError if too many have failed.
        """
        self.num_failed = self.num_failed + 1 if trajectory.finish_reason == "failed" else 0
        if self.num_failed > MAX_FAILED:
            raise ValueError(
                f"{MAX_FAILED} failed trajectories one after the other, the last by {trajectory.failure}"
            )
        # A Join that waited looks like a clock that is behind. No trajectory ends in the future.
        ahead_s = self.clock_ahead_s = max(self.clock_ahead_s, trajectory.ended_at - time.time())
        if trajectory.num_generated:
            lag = newest_version - trajectory.oldest_version
            self.counts.update(trajectories=1, tokens=trajectory.num_generated, lags=lag)
        return replace(
            trajectory,
            worker=worker,
            started_at=trajectory.started_at - ahead_s,
            ended_at=trajectory.ended_at - ahead_s,
            turns=tuple(tuple(at - ahead_s for at in turn) for turn in trajectory.turns),
        )

    def take_megabytes(self) -> dict[str, float]:
        """Return 10⁶ bytes sent and received since the last call."""
        num_bytes, self.link.num_bytes = self.link.num_bytes, Counter()
        return {f"mb_{direction}": num_bytes[direction] / 1e6 for direction in ("sent", "received")}


class Members:
    """The hosts of a node. Its thread adds and removes them; other threads ask."""

    def __init__(self, record_event: Callable[..., None]):
        """`record_event(event, **fields)` writes an event."""
        self.hosts: dict[bytes, Host] = {}
        """Hosts that are there, by identity."""
        self.counts: Counter[str] = Counter()
        self._record_event = record_event
        self.identities: dict[int, bytes] = {}
        """Identity of the host of each worker, also of hosts that have left."""
        self.shut_out: set[bytes] = set()
        """Identities of hosts that are not believed any more."""
        self._reported_at = time.monotonic()

    @property
    def num_workers(self) -> int:
        """Engines of hosts that are there."""
        return sum(len(host.engines) for host in list(self.hosts.values()))

    def add(self, host: Host) -> None:
        """Take in a host, and give it a name that no other host has."""
        taken = {other.name for other in self.hosts.values()}
        numbered = (f"{host.name}.{number}" for number in itertools.count(2))
        host.name = next(n for n in itertools.chain([host.name], numbered) if n not in taken)
        self.hosts[host.identity] = host
        self.counts["joins"] += 1

    def add_engine(self, host: Host, engine: int, worker: Worker) -> None:
        """Note that a host's engine is up."""
        host.engines[engine] = worker
        self.identities[worker.index] = host.identity

    def remove(self, host: Host, why: str) -> None:
        """Note that a host has gone."""
        del self.hosts[host.identity]
        self.counts.update(host.take_megabytes() | {"leaves": 1})
        tickets = sum(len(worker.tickets) for worker in host.engines.values())
        self._record_event("machine_left", machine=host.name, why=why, tickets=tickets)
        print(f"swarm: {host.name} {why}; its {tickets} tickets are issued again", flush=True)

    @property
    def disbelieved(self) -> set[int]:
        """Workers of hosts that were shut out, also of hosts that had left before."""
        identities = list(self.identities.items())
        return {worker for worker, identity in identities if identity in self.shut_out}

    def take_metrics(self) -> Measured:
        """Take the metrics `swarm/*` of the hosts since the last call, and record an event for each host."""
        hosts, metrics = list(self.hosts.values()), {}
        now = time.monotonic()
        seconds, self._reported_at = now - self._reported_at, now
        for host in hosts:
            megabytes = host.take_megabytes()
            self.counts.update(megabytes)
            counts, host.counts = host.counts, Counter()
            measured = megabytes | {"tokens_per_s": counts["tokens"] / seconds}
            if counts["trajectories"]:
                measured["lag"] = counts["lags"] / counts["trajectories"]
            workers = [worker.index for worker in host.engines.values()]
            self._record_event("machine", machine=host.name, workers=workers, **measured)
            if len(hosts) <= MAX_NAMED:
                metrics |= {f"{host.name}/{name}": value for name, value in measured.items()}
        metrics |= {name: self.counts[name] for name in COUNTS}
        metrics |= {"machines": len(hosts), "workers": self.num_workers}
        metrics["shut_out"] = len(self.shut_out)
        return {f"swarm/{name}": value for name, value in metrics.items()}
