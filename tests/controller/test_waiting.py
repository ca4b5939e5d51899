"""How long the controller waits while workers come and go."""

import threading
import time

import pytest

from asyncrl.controller.announcements import Announcements
from asyncrl.controller.waiting import Changes

TIMEOUT_S = 1.5
"""A little more than the second after which a wait looks again."""


def changes(are_coming_for_s: float) -> Changes:
    """The waits of a controller whose workers take some time to come."""
    begun = time.monotonic()

    class Workers:
        @property
        def are_coming(self):
            return time.monotonic() < begun + are_coming_for_s

        def check(self):
            pass

    return Changes(TIMEOUT_S, Workers(), Announcements([]), lambda: "state")


def test_a_wait_has_all_its_time_after_a_worker_has_come_however_long_that_took():
    waited, answer = changes(are_coming_for_s=2 * TIMEOUT_S), []

    def answer_it():
        with waited:
            answer.append(1)
            waited.notify_all()

    threading.Timer(2.3 * TIMEOUT_S, answer_it).start()
    with waited:
        assert waited.wait_until(lambda: answer, "an answer") == [1]


def test_a_wait_without_a_worker_that_comes_ends_with_the_state_of_all():
    waited = changes(are_coming_for_s=0)
    with (
        waited,
        pytest.raises(RuntimeError, match=r"^waited 2 s for an answer; stacks .*; state: state$"),
    ):
        waited.wait_until(lambda: None, "an answer")
