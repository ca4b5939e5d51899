"""A virtual clock that runs actions at points of simulated time, in seconds."""

import heapq
import itertools
import math
from collections.abc import Callable


class Clock:
    """Runs actions in the order of their times. Actions of one time run in the order of their arrival."""

    def __init__(self) -> None:
        self.now = 0.0
        self._order = itertools.count()
        self._actions: list[tuple[float, int, Callable[[], None]]] = []

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        """Run `action` at that time, or now if it has passed."""
        heapq.heappush(self._actions, (max(time_s, self.now), next(self._order), action))

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        """Run `action` after this delay. With 0 it runs after all actions that are already due."""
        self.at(self.now + delay_s, action)

    def run_until(self, is_done: Callable[[], bool]) -> None:
        """Run actions until `is_done()`. Raises RuntimeError if no action is left."""
        while not is_done():
            if not self._actions:
                raise RuntimeError(
                    f"the simulation is stuck at {self.now:.3f} s: no action is left"
                )
            self.now, _, action = heapq.heappop(self._actions)
            action()


class Alarm:
    """Runs one action after a delay. A new delay replaces the earlier one."""

    def __init__(self, clock: Clock, action: Callable[[], None]):
        self.clock, self._action, self._number = clock, action, 0

    def set(self, delay_s: float) -> None:
        """Run the action after this delay; with an infinite one, never."""
        self._number += 1
        if delay_s < math.inf:
            number = self._number
            self.clock.after(delay_s, lambda: self._ring(number))

    def _ring(self, number: int) -> None:
        if number == self._number:
            self._action()
