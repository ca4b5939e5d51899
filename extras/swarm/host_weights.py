"""Weights on this host: pulled once for all its engines, and put into memory that the engines share."""

from collections.abc import Callable, Iterator, Sequence

from asyncrl.weights.shm import ShmTransport
from asyncrl.weights.transport import Staged
from extras.swarm.host_engine import HostEngine
from extras.swarm.puller import Puller
from extras.swarm.wire import Pull


class HostWeights:
    """Brings the versions that engines want to this host, and into shared memory."""

    def __init__(self, init_info: dict, ask: Callable[[Pull], None], wake: Callable[[], None]):
        """See Puller for `init_info`, `ask` and `wake`."""
        self.puller = Puller(init_info, ask, wake)
        self.transport = ShmTransport(self.puller.specs)
        self._staged: tuple[str, Staged] | None = None  # digest of what engines can load

    def supply(self, engines: Sequence[HostEngine]) -> Iterator[tuple[int, int]]:
        """Give engines the weights that are here, and pull the next version that an engine wants, oldest first.

        Yields the index of each engine whose weights have come, and their version.
        """
        here = self.puller.here
        if here is not None and (self._staged is None or self._staged[0] != here.digest):
            if not self.transport.try_reserve_buffer():
                return  # until an engine has loaded older weights
            staged = self.transport.stage(here.version, self.puller.parameters())
            self.transport.make_readable(staged)
            self._staged = here.digest, staged
        for index, engine in enumerate(engines):
            if here is not None and engine.wanted and engine.wanted["digest"] == here.digest:
                # not that of `here`: versions may be equal to the bit
                version = engine.wanted["version"]
                engine.wanted, engine.fetched = None, self._staged[1]
                self.transport.acquire(engine.fetched)
                yield index, version
        wanted = [engine.wanted for engine in engines if engine.wanted is not None]
        if self.puller.wanted in wanted:
            self.puller.want(self.puller.wanted)
        elif wanted:
            self.puller.want(min(wanted, key=lambda info: info["version"]))
