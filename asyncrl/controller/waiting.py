"""Waiting for workers, at the controller's one lock: no wait is without end, and each ends with the state of all."""

import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

from asyncrl.cluster.stacks import dump_stacks
from asyncrl.controller.announcements import Announcements
from asyncrl.controller.workers import Workers


class Changes(threading.Condition):
    """The lock that guards all of the controller's state. It is notified of every change, and waits for one."""

    def __init__(
        self,
        timeout_s: float,
        workers: Workers,
        announcements: Announcements,
        describe: Callable[[], str],
    ):
        """`describe()` returns what every worker does, for the errors."""
        super().__init__()
        self.timeout_s = timeout_s
        self.workers = workers
        self.announcements = announcements
        self.describe = describe

    def on_thread_ended(self, _) -> None:
        """Have whoever waits look at why a reading thread ended."""
        with self:
            self.notify_all()

    def wait_until(
        self, done: Callable[[], Any], what: str, can_come: Callable[[], bool] = lambda: True
    ) -> Any:
        """Wait until `done()` is true and return its value. It is called after every change, under the lock.

        A worker that starts or joins has a timeout of its own; this one begins anew when the worker is there. Raises
        what went wrong in the background. Raises RuntimeError after the timeout, or as soon as `can_come()` is false
        and nothing changes.
        """
        deadline = time.monotonic() + self.timeout_s
        while True:
            self._check()
            if result := done():
                return result
            is_in_vain = not can_come()
            # else a thread that failed has just said why
            if not self.wait(timeout=1.0) and is_in_vain:
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
