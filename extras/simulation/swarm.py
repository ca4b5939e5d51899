"""A simulated swarm for the real Controller: hosts of unequal speed that join, fetch weights, and leave.

Stands where extras/swarm/swarm.py and the far end do. A host that joins fetches all weights; later it fetches what
has changed since those that it has, if the run still keeps these, and samples on meanwhile. k versions change
1 − (1 − delta_share)^k of the weights: what one step changes is taken to be independent of other steps. Hosts that
are there at the start have version 0. Joins are a Poisson process, a stay is exponential, and a host that ends
without a word is found to be gone after SILENCE_S.

Not simulated: latency and losses of the network, the way of responses to the trainer (17 bytes a token), the making and
applying of deltas, the trainer's own writing to a file system, starts of engines, sockets, msgpack, and lies.
"""

import functools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from asyncrl.messages import Ready
from extras.simulation.clock import Clock
from extras.simulation.engine import Cluster, SimulatedEngine
from extras.simulation.fleet import SimulatedFleet, SimulatedProcess
from extras.swarm.controller import SwarmController
from extras.swarm.pull import KEPT
from extras.swarm.remote import SwarmWorkers
from extras.swarm.wire import BEAT_S, SILENCE_S, Fetch, Fetched

CRASH_SHARE = 0.5
"""Of the hosts that go, how many do so without a word."""
SPEED_SIGMA = 0.5
"""Standard deviation of the log of a host's speed; the median host has the speed of the curve."""
LINKS_BYTES_PER_S = (1.25e6, 125e6)
"""Slowest and fastest link of a host, 10 and 1000 Mbit/s; log-uniform between them."""


class Uplink:
    """A link that all who pull share fairly; each also has a link of its own (max-min fairness)."""

    def __init__(self, clock: Clock, bytes_per_s: float):
        self.clock, self.bytes_per_s, self.sent_bytes = clock, bytes_per_s, 0.0
        self._done: list[Callable[[], None]] = []  # what each pull is to call
        self._left, self._links, self._rates = np.zeros((3, 0))  # bytes, and bytes/s
        self._updated_at, self._wake_number = 0.0, 0

    def pull(self, num_bytes: float, link_bytes_per_s: float, on_done: Callable[[], None]) -> None:
        """Begin to pull; `on_done()` is called at the end."""
        self._advance()
        self._done.append(on_done)
        self._left = np.append(self._left, num_bytes)
        self._links = np.append(self._links, link_bytes_per_s)
        self._share()

    def end(self, ended: list[Callable[[], None]]) -> None:
        """End the pulls that were to call these."""
        self._advance()
        keep = np.array([done not in ended for done in self._done], bool)
        self._done = [done for done in self._done if done not in ended]
        self._left, self._links = self._left[keep], self._links[keep]
        self._share()

    def _advance(self) -> None:
        sent = self._rates * (self.clock.now - self._updated_at)
        self._left, self._updated_at = self._left - sent, self.clock.now
        self.sent_bytes += float(sent.sum())

    def _share(self) -> None:
        """Divide the link anew, and look forward to the next end."""
        self._rates = np.minimum(self._links, fair_share(self._links, self.bytes_per_s))
        self._wake_number += 1
        if self._done:
            number = self._wake_number
            self.clock.after(
                max(0.0, float((self._left / self._rates).min())), lambda: self._wake(number)
            )

    def _wake(self, number: int) -> None:
        if number == self._wake_number:  # else something changed meanwhile
            self._advance()
            # rounding may leave a little
            ended = [self._done[place] for place in np.flatnonzero(self._left <= 1.0)]
            self.end(ended)
            for done in ended:
                done()


def fair_share(links: np.ndarray, capacity: float) -> float:
    """Most that one may have, bytes/s, so that all of `capacity` is used or every link is full."""
    ascending = np.sort(links)
    shares = (capacity - np.cumsum(ascending) + ascending) / np.arange(len(links), 0, -1)
    return float(next(iter(shares[shares < ascending]), np.inf))


class SimulatedSwarmWorkers(SimulatedFleet, SwarmWorkers):
    """Workers of hosts that come and go."""


class FetchingProcess(SimulatedProcess):
    """An engine of a host, which has weights come before it loads them."""

    fetch: Callable[[int], None]

    def _act_on(self, message) -> None:
        if isinstance(message, Fetch):
            self.fetch(message.version)
        else:
            super()._act_on(message)


@dataclass(eq=False)
class Host:
    """A host that has joined."""

    link_bytes_per_s: float
    version: int | None
    """Weights that are here."""
    process: FetchingProcess | None = None
    fetched: Callable[[], None] | None = None
    """What ends the fetch that is under way."""


class SimulatedSwarm:
    """Lets hosts in and has them leave; brings weights to them."""

    kinds = (SimulatedSwarmWorkers, SwarmController)
    """Classes of workers and controller."""

    def __init__(self, simulation, cluster: Cluster):
        self.simulation, self.clock = simulation, simulation.clock
        self.cluster, self.known = cluster, cluster.swarm
        simulation.controller.dispatcher.now = self.clock.monotonic
        self._random = random.Random(f"swarm {simulation.case.seed}")
        self.uplink = Uplink(self.clock, self.known.uplink_bytes_per_s)
        self.fetches_s: list[float] = []
        """Time of each fetch of a host that had older weights."""
        self.gone_slot_s = 0.0
        """Seconds that slots were taken of hosts that are gone."""
        for _ in range(cluster.num_workers):
            self._join(version=0)
        self._wait_for_next()
        self._beat()

    def _beat(self) -> None:
        with self.simulation.workers.timed():
            self.simulation.controller.end_leases()
        self.clock.after(BEAT_S, self._beat)

    def _wait_for_next(self) -> None:
        delay_s = self._random.expovariate(self.cluster.num_workers / self.known.stay_s)
        self.clock.after(delay_s, lambda: (self._join(version=None), self._wait_for_next()))

    def _join(self, version: int | None) -> None:
        draw, (slowest, fastest) = self._random, LINKS_BYTES_PER_S
        simulation, cluster = self.simulation, self.cluster
        engine = SimulatedEngine(
            self.clock, cluster.curve.times(draw.lognormvariate(0, SPEED_SIGMA))
        )
        host = Host(slowest * (fastest / slowest) ** draw.random(), version)
        process = host.process = FetchingProcess(
            -1, self.clock, simulation.config, simulation.case.workload, engine, cluster.sync_s
        )
        process.fetch = functools.partial(self._fetch, host)
        with simulation.workers.timed():
            worker = simulation.controller.let_in(process, "host", True)
            process.index = worker.index
            simulation.workers.listen(worker)
            simulation.controller.on_message(worker, Ready(0.0))
        self.clock.after(draw.expovariate(1 / self.known.stay_s), lambda: self._end(host))

    def _end(self, host: Host) -> None:
        """Have a host go, and be found to be gone."""
        process = host.process
        silence_s = SILENCE_S if self._random.random() < CRASH_SHARE else 0.0
        tell = process.reply
        process.reply = process.send = lambda message: None
        self.gone_slot_s += process.engine.slot_s_now()
        process.engine.stop()
        self.uplink.end([host.fetched])
        self.clock.after(silence_s, lambda: tell(None))

    def _fetch(self, host: Host, version: int) -> None:
        """Bring weights to a host: what has changed if the run has the way there from what it has, else all."""
        behind, delta, share = version - (host.version or 0), self.known.delta_share, 1.0
        if host.version is not None and self.uplink.bytes_per_s == math.inf:
            share = min(1.0, behind * delta)  # files lead from each version to the next
        elif host.version is not None and behind < KEPT:
            share = 1 - (1 - delta) ** behind
        host.fetched = functools.partial(self._fetched, host, version, self.clock.now)
        self.uplink.pull(share * self.known.weight_bytes, host.link_bytes_per_s, host.fetched)

    def _fetched(self, host: Host, version: int, began_at: float) -> None:
        if host.version not in (None, version):
            self.fetches_s.append(self.clock.now - began_at)
        host.version = version
        host.process.reply(Fetched(version))
