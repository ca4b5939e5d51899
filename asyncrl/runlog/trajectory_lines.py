"""The events of trajectories as short lines, for they are nearly all of events.jsonl.

A trajectory is a list of the values that COLUMNS names. Its times are whole milliseconds, the first since a moment that
the run's first event says, each other since the one before it: its start; begin, end and answer of each turn; its end;
and when it was recorded. They are cut and not rounded, so that none comes after an event that it caused. Every other
event is an object that names its fields.
"""

from itertools import accumulate, pairwise
from math import floor

COLUMNS = (
    "ticket", "group", "member", "worker", "times_ms", "tokens", "finish_reason", "reward", "min_version",
    "max_version", "failure",
)  # fmt: skip
OPTIONAL = COLUMNS[-3:]
"""An event has those that mean something: versions of tokens, if there are any, and why it failed."""
TIMES = ("started_at", "turns", "ended_at", "time")
"""What of an event is in times_ms; Unix times, seconds."""
LEGEND = "trajectory_lines"
"""Field of the event that says how the lists after it are to be read."""


def legend(since: float) -> dict:
    """The field of an event by which `expand` reads what `shorten` makes after it with the same `since`, Unix time."""
    return {LEGEND: {"since": since, "columns": COLUMNS}}


def shorten(event: dict, since: float) -> list | dict:
    """An event of a trajectory as a list; one that has not just the fields of a trajectory as it is."""
    fields = event.keys() - {"event"}
    if not {*COLUMNS, *TIMES} - {"times_ms", *OPTIONAL} <= fields <= {*COLUMNS, *TIMES}:
        return event
    of_turns = [moment for turn in event["turns"] for moment in turn]
    moments = [event["started_at"], *of_turns, event["ended_at"], event["time"]]
    times_ms = [b - a for a, b in pairwise([0, *(floor(1000 * (moment - since)) for moment in moments)])]
    values = [(event | {"times_ms": times_ms}).get(name) for name in COLUMNS]
    return values if "failure" in event else values[:-1]


def expand(lines: list[dict | list], name: str = "events.jsonl") -> list[dict]:
    """The events of a file of that name, those of trajectories as they were before `shorten`, but for times cut to
    milliseconds.

    Raises ValueError for a list before which no event says how to read it.
    """
    events, read = [], None
    for line in lines:
        if isinstance(line, dict):
            read = line.get(LEGEND, read)
        elif read is None:
            what = f"trajectory {line} stands before the event with {LEGEND!r}"
            raise ValueError(f"{name}: {what}; restore the file's beginning")
        events.append(_event(line, **read) if isinstance(line, list) else line)
    return events


def _event(values: list, since: float, columns: list[str]) -> dict:
    event = {"event": "trajectory"} | dict(zip(columns, values, strict=False))
    started_at, *of_turns, ended_at, time = (round(since + ms / 1000, 3) for ms in accumulate(event.pop("times_ms")))
    turns = [of_turns[i : i + 3] for i in range(0, len(of_turns), 3)]
    times = {"time": time, "started_at": started_at, "ended_at": ended_at, "turns": turns}
    return {name: value for name, value in (event | times).items() if name not in OPTIONAL or value is not None}
