"""Which failures are one kind, and what a run prints of them."""

from dataclasses import replace

import pytest

from asyncrl.controller.failures import MAX_KINDS, OTHER_KIND, Failures


def fail(*messages, num_ended=0):
    """The count after responses that failed with messages, and others that ended."""
    failures = Failures()
    for message in [*messages, *[""] * num_ended]:
        failures.count(message)
    return failures


@pytest.mark.parametrize(
    ("first", "second", "is_one_kind"),
    [
        ("/a.py:f, line 8: KeyError: 'x'", "/a.py:f, line 8: KeyError: 'y'", True),
        ("/a.py:f, line 8: KeyError: 'x'", "/a.py:f, line 9: KeyError: 'x'", False),
        ("/a.py:f, line 8: KeyError: 'x'", "/a.py:f, line 8: ValueError: 'x'", False),
        ("/a.py:f, line 8: a.b.C: so", "/a.py:f, line 8: a.b.C: and so", True),
        ("/a.py:f: timed out after 10 s", "/a.py:f: its process died", False),
        ("ValueError: response 17 is 'abc'", "ValueError: response 4 is 'x'", True),
        ("a.py:f: the reward is nan, not a finite number", "a.py:f: timed out after 1 s", False),
    ],
)
def test_failures_are_told_apart_by_place_and_type_and_not_by_what_they_quote(
    first, second, is_one_kind
):
    reasons = fail(first, second, first).reasons
    assert reasons == ({first: 3} if is_one_kind else {first: 2, second: 1})


def test_a_message_that_is_new_each_time_does_not_fill_the_memory():
    failures = fail(*(f"{chr(0x4E00 + i)} is no answer" for i in range(MAX_KINDS + 50)))
    assert len(failures.reasons) == MAX_KINDS + 1 and failures.reasons[OTHER_KIND] == 50


@pytest.mark.parametrize(
    ("failures", "earlier", "is_reported", "text"),
    [
        (fail("no", num_ended=99), Failures(), False, "1 of 100 responses (1.0%)"),
        (fail("no", num_ended=98), Failures(), True, "1 of 99 responses (1.0%)"),
        (fail(*["no"] * 9, "b", num_ended=90), fail(*["no"] * 9), True, "1 of 91 responses (1.1%)"),
        (fail(*["no"] * 9, num_ended=90), fail(*["no"] * 9), False, "0 of 90 responses (0.0%)"),
        (
            replace(fail(num_ended=2000), num_groups=1000, num_failed_groups=20),
            Failures(),
            True,
            "20 of 1,000 groups (2.0%) and 0 of 2,000 responses (0.0%) failed",
        ),
        (fail("a", "b", "b", num_ended=1), Failures(), True, "failed; most often (2): b"),
    ],
)
def test_shares_are_of_what_ended_since_the_last_look(failures, earlier, is_reported, text):
    newest = failures.since(earlier)
    assert newest.is_reported is is_reported
    assert text in str(newest)
