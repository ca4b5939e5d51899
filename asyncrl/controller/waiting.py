"""Waiting for workers, at the controller's one lock: no wait is without end, and each ends with the state of all."""

import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

from asyncrl.cluster.stacks import dump_stacks
from asyncrl.controller.announcements import Announcements
from asyncrl.controller.workers import Workers


class Changes(threading.Condition):
    """The lock that guards all of the controller's state, told of every change, and the waits for one."""

    def __init__(self, timeout_s: float, workers: Workers, announcements: Announcements, describe: Callable[[], str]):
        """`describe()` says what every worker does, for the errors."""
        super().__init__()
        self.timeout_s, self.workers, self.announcements, self.describe = timeout_s, workers, announcements, describe

    def on_thread_ended(self, _) -> None:
        """Have whoever waits look at why a reading thread ended."""
        with self:
            self.notify_all()

    def wait_until(self, done: Callable[[], Any], what: str, can_come: Callable[[], bool] = lambda: True) -> Any:
        """Wait until `done()`, which is asked after every change, and return what it gives; the caller holds the lock.

        The start of a worker, or its coming, has a timeout of its own; this one begins anew when it is there. Raises
        what went wrong in the background, RuntimeError after the timeout, and without it once `can_come()` says that
        the wait is in vain.
        """
        deadline = time.monotonic() + self.timeout_s
        while True:
            self._check()
            if result := done():
                return result
            is_in_vain = not can_come()
            if not self.wait(timeout=1.0) and is_in_vain:  # else a thread that failed has just said why
                raise RuntimeError(
                    f"{what} can never come: nothing runs, and nothing may start before the next weights are "
                    f"published; state: {self.describe()}"
                )
            if self.workers.are_coming:
                deadline = time.monotonic() + self.timeout_s
            elif time.monotonic() > deadline:
                self._raise_with_stacks(f"waited {self.timeout_s:.0f} s for {what}")

    def _check(self) -> None:
        self.workers.check()
        try:
            self.announcements.transport.check()
        except TimeoutError as error:
            self._raise_with_stacks(str(error))

    def _raise_with_stacks(self, what: str) -> NoReturn:
        raise RuntimeError(f"{what}; {dump_stacks()}; state: {self.describe()}") from None
