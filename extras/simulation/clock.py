"""A virtual clock: actions at points of simulated time, in seconds."""

import heapq
import itertools
from collections.abc import Callable


class Clock:
    """Runs actions in the order of their times; those of the same time in the order in which they were asked for."""

    def __init__(self) -> None:
        self.now = 0.0
        self._order = itertools.count()
        self._actions: list[tuple[float, int, Callable[[], None]]] = []

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        """Run `action` at that time, or now if it has passed."""
        heapq.heappush(self._actions, (max(time_s, self.now), next(self._order), action))

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        """Run `action` in so many seconds; with 0, after all that is due already."""
        self.at(self.now + delay_s, action)

    def monotonic(self) -> float:
        """The simulated time, seconds: the clock can stand where the module `time` does."""
        return self.now

    def run_until(self, done: Callable[[], bool]) -> None:
        """Run actions until `done()`, which is asked after each. Raises RuntimeError if nothing is left to do."""
        while not done():
            if not self._actions:
                raise RuntimeError(
                    f"the simulation stands still at {self.now:.3f} s: nobody has anything left to do"
                )
            self.now, _, action = heapq.heappop(self._actions)
            action()
