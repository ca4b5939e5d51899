"""A simulated swarm for the real Controller: hosts of unequal speed that join, fetch weights, and leave.

It replaces extras/swarm/swarm.py and the remote side. A host that joins fetches all weights. Later it fetches only the
changed ones if the run still keeps its version. It samples meanwhile. k versions change 1 − (1 − delta_share)^k of the
weights, because steps are assumed to change independent parts. Hosts that are there at the start have version 0.
Joins are a Poisson process, and a stay is exponential. A host that crashes is noticed after SILENCE_S.

The simulation lacks latency and losses of the network, and the transfer of responses (17 bytes a token). It also lacks
making and applying deltas, and the trainer's own writing to a file system. Starts of engines, sockets, msgpack and
false samples are lacking, too.
"""

import functools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from asyncrl.messages import Ready
from extras.simulation.clock import Alarm, Clock
from extras.simulation.engine import Cluster
from extras.simulation.workers import SimulatedFleet, SimulatedProcess
from extras.swarm.controller import SwarmController
from extras.swarm.pull import KEPT
from extras.swarm.remote import SwarmWorkers
from extras.swarm.wire import BEAT_S, SILENCE_S, Fetch, Fetched

CRASH_SHARE = 0.5
"""Share of the hosts that leave without a message."""
SPEED_SIGMA = 0.5
"""Standard deviation of the log of a host's speed. The median host has the speed of the curve."""
SLOWEST_LINK, FASTEST_LINK = 1.25e6, 125e6
"""Links of hosts, bytes/s: 10 to 1000 Mbit/s, log-uniform."""


class Uplink:
    """A link that all pulls share fairly (max-min fairness). Each pull also has the link of its host."""

    def __init__(self, clock: Clock, bytes_per_s: float):
        self.clock, self.bytes_per_s, self.sent_bytes = clock, bytes_per_s, 0.0
        self._on_done: list[Callable[[], None]] = []  # one for each pull, as in the arrays
        self._left, self._links, self._rates = np.zeros((3, 0))  # bytes, bytes/s, bytes/s
        self._alarm = Alarm(clock, self._end_pulls)
        self._updated_at = 0.0

    def pull(self, num_bytes: float, link_bytes_per_s: float, on_done: Callable[[], None]) -> None:
        """Begin to pull. `on_done()` is called at the end."""
        self._advance()
        self._on_done.append(on_done)
        self._left = np.append(self._left, num_bytes)
        self._links = np.append(self._links, link_bytes_per_s)
        self._share()

    def abort(self, on_done: Callable[[], None] | None) -> None:
        """End the pull with this `on_done`, if there is one, without calling it."""
        self._advance()
        self._keep(np.array([other is not on_done for other in self._on_done], bool))

    def _end_pulls(self) -> None:
        self._advance()
        is_running = self._left > 1.0  # rounding may leave a little
        ended = [self._on_done[place] for place in np.flatnonzero(~is_running)]
        self._keep(is_running)
        for on_done in ended:
            on_done()

    def _advance(self) -> None:
        sent = self._rates * (self.clock.now - self._updated_at)
        self._left, self._updated_at = self._left - sent, self.clock.now
        self.sent_bytes += float(sent.sum())

    def _keep(self, is_running: np.ndarray) -> None:
        self._on_done = [self._on_done[place] for place in np.flatnonzero(is_running)]
        self._left, self._links = self._left[is_running], self._links[is_running]
        self._share()

    def _share(self) -> None:
        """Divide the link, and set the alarm for the next end."""
        self._rates = np.minimum(self._links, fair_share(self._links, self.bytes_per_s))
        self._alarm.set(max(0.0, float(np.min(self._left / self._rates, initial=math.inf))))


def fair_share(links: np.ndarray, capacity: float) -> float:
    """Return the most bytes/s of one pull such that all of `capacity` is used or every link is full."""
    ascending = np.sort(links)
    shares = (capacity - np.cumsum(ascending) + ascending) / np.arange(len(links), 0, -1)
    return float(next(iter(shares[shares < ascending]), np.inf))


class SimulatedSwarmWorkers(SimulatedFleet, SwarmWorkers):
    """Workers of hosts that join and leave."""


class FetchingProcess(SimulatedProcess):
    """An engine of a host. It fetches weights before it loads them."""

    fetch: Callable[[int], None]

    def _act_on(self, message) -> None:
        if isinstance(message, Fetch):
            self.fetch(message.version)
        else:
            super()._act_on(message)


@dataclass(eq=False)
class Host:
    """A host that has joined."""

    process: FetchingProcess
    link_bytes_per_s: float
    version: int | None
    """Fetched weights."""
    on_fetched: Callable[[], None] | None = None
    """End of the current fetch, or of the last one."""


class SimulatedSwarm:
    """Makes hosts join and leave, and brings weights to them."""

    kinds = (SimulatedSwarmWorkers, SwarmController)
    """Classes of workers and controller."""

    def __init__(self, simulation, cluster: Cluster):
        self.simulation, self.clock = simulation, simulation.clock
        self.swarm = cluster.swarm
        self.joins_per_s = cluster.num_workers / cluster.swarm.stay_s
        simulation.controller.dispatcher.now = lambda: self.clock.now
        self._random = random.Random(f"swarm {simulation.case.seed}")
        self.uplink = Uplink(self.clock, self.swarm.uplink_bytes_per_s)
        self.fetches_s: list[float] = []
        """Time of each fetch of a host that had older weights."""
        self.gone_slot_s = 0.0
        """Seconds that slots of hosts that have left were taken."""
        for _ in range(cluster.num_workers):
            self._join(version=0)
        self._wait_for_next()
        self._beat()

    def _beat(self) -> None:
        with self.simulation.workers.timed():
            self.simulation.controller.move_tickets()
        self.clock.after(BEAT_S, self._beat)

    def _wait_for_next(self) -> None:
        delay_s = self._random.expovariate(self.joins_per_s)
        self.clock.after(delay_s, lambda: (self._join(version=None), self._wait_for_next()))

    def _join(self, version: int | None) -> None:
        draw, simulation = self._random, self.simulation
        speed = draw.lognormvariate(0, SPEED_SIGMA)
        link = SLOWEST_LINK * (FASTEST_LINK / SLOWEST_LINK) ** draw.random()
        case = simulation.case
        process = FetchingProcess(
            -1, self.clock, simulation.config, case.workload, case.cluster, speed
        )
        host = Host(process, link, version)
        process.fetch = functools.partial(self._fetch, host)
        with simulation.workers.timed():
            worker = simulation.controller.let_in(process, "host", True)
            process.index = worker.index
            simulation.workers.listen(worker)
            simulation.controller.on_message(worker, Ready(0.0))
        self.clock.after(draw.expovariate(1 / self.swarm.stay_s), lambda: self._leave(host))

    def _leave(self, host: Host) -> None:
        """End a host. The controller learns of it now, or after SILENCE_S if it crashed."""
        process = host.process
        silence_s = SILENCE_S if self._random.random() < CRASH_SHARE else 0.0
        reply = process.reply
        process.reply = process.send = lambda message: None
        self.gone_slot_s += process.engine.slot_s_now()
        process.engine.stop()
        self.uplink.abort(host.on_fetched)
        self.clock.after(silence_s, lambda: reply(None))

    def _fetch(self, host: Host, version: int) -> None:
        """Bring weights to a host: the changed ones if the run still has its version, else all."""
        behind, delta_share, share = version - (host.version or 0), self.swarm.delta_share, 1.0
        if host.version is not None and self.uplink.bytes_per_s == math.inf:
            share = min(1.0, behind * delta_share)  # files lead from each version to the next
        elif host.version is not None and behind < KEPT:
            share = 1 - (1 - delta_share) ** behind
        host.on_fetched = functools.partial(self._end_fetch, host, version, self.clock.now)
        self.uplink.pull(share * self.swarm.weight_bytes, host.link_bytes_per_s, host.on_fetched)

    def _end_fetch(self, host: Host, version: int, began_at: float) -> None:
        if host.version not in (None, version):
            self.fetches_s.append(self.clock.now - began_at)
        host.version = version
        host.process.reply(Fetched(version))
