"""Accounts of time from events made by hand; every sum is of whole nanoseconds and exact."""

import itertools
import random
from collections import Counter

from asyncrl.messages import ActivityReport
from asyncrl.runlog.time_ledger import (
    WORKER_STATES,
    Activity,
    TimeLedger,
)

# One ledger


def test_accounts_follow_on_each_other_and_say_every_nanosecond_what_was_done():
    """An oracle of its own: the state of each nanosecond, in a list."""
    rng, start = random.Random(0), 1_700_000_000_000_000_000
    ledger, spans, states, state = TimeLedger(start), [], [], "starting"
    total = Counter()
    for _ in range(2000):
        states += [state] * rng.choice([0, 1, rng.randrange(9)])
        now = start + len(states)
        if rng.random() < 0.1:
            account = ledger.take(now)
            spans += account.spans
            total += account.spent
        else:
            state = rng.choice(list(WORKER_STATES))
            ledger.enter(state, now)
    account = ledger.take(start + len(states))
    spans += account.spans
    assert [name for name, begin, end in spans for _ in range(end - begin)] == states
    assert spans[0][1] == start and ledger.until == start + len(states)
    assert all(before[2] == after[1] for before, after in itertools.pairwise(spans))
    assert total + account.spent == ledger.total == Counter(states)


# What a worker does


def test_what_a_worker_does_follows_from_what_it_has_to_do_and_from_what_holds_it_back():
    activity = Activity(itertools.count().__next__)  # ns, one for each change
    activity.add(trajectories=2)
    activity.add(requests=1)
    activity.add(requests=1)
    activity.pause("suspended")
    activity.add(requests=-1)
    activity.pause("update")
    activity.resume()
    activity.add(requests=-1)
    activity.add(trajectories=-1)
    activity.add(trajectories=-1)
    for reason in ("weights", "version", "bound", "evaluation", "round"):
        activity.set_idle(reason)
    activity.add(trajectories=1, requests=1)
    activity.add(trajectories=-1, requests=-1)
    states = [
        ("starved", ""), ("environment", ""), ("decoding", ""), ("gated", "suspended"), ("paused", "update"),
        ("decoding", ""), ("environment", ""), ("starved", ""), ("gated", "weights"), ("gated", "version"),
        ("gated", "bound"), ("gated", "evaluation"), ("starved", "round"), ("decoding", ""), ("starved", ""),
    ]  # fmt: skip
    changes = tuple((now, *state) for now, state in enumerate(states))
    assert activity.report() == ActivityReport(changes, len(states))
    assert activity.report().changes == (), "a report has only what is new"
