"""The events of a run in the Chrome trace-event format. report.py and https://ui.perfetto.dev can draw them.

A process of the trace is a lane, and its threads are rows. Lanes are the trainer, the evaluations, the remote hosts if
any joined, and every worker. The trainer's lane has steps, and its states in each. A worker's lane has its states, its
updates, and its responses, in as many rows as ran at the same time. A worker's states follow on each other without a
gap. A worker on a remote host reports no states, and has one bar from its start to its end.
"""

from collections import defaultdict
from datetime import datetime
from itertools import accumulate, pairwise
from operator import itemgetter
from typing import NamedTuple

from scripts.runs import Run

ROWS = {"trainer": ["steps", "states"], "evaluation": ["evaluations"], "remote hosts": ["hosts"]}
"""Names of a lane's rows. All other lanes are of workers."""
WORKER_ROWS = ["states", "updates"]
"""Names of a worker's first rows. Its other rows are slots for responses."""
RESPONSE = (
    "ticket",
    "group",
    "member",
    "tokens",
    "oldest_version",
    "newest_version",
    "reward",
    "finish_reason",
    "failure",
)
"""Fields in the details of a response's bar."""


class Bar(NamedTuple):
    """Something that took time, or a moment. Bars of one row do not overlap."""

    row: int
    start: float
    """Unix time, seconds."""
    end: float | None
    """Unix time, seconds. None for a moment."""
    kind: str
    """`response`, `evaluation`, `step`, `update`, `away` (on a remote host), or a state of
    asyncrl/runlog/time_ledger.py. A moment has `started`, `died`, `joined` or `left`."""
    name: str
    """Its label. A response is labelled by its oldest version, because Perfetto colours bars by their names."""
    details: dict


def trace_of(run: Run) -> dict:
    """Return the events of a run as a trace. Its times are µs since the run's start."""
    times = [record["time"] for record in run.records]
    times.append(datetime.fromisoformat(run.info["started_at"]).timestamp())
    start, end = min(times), max(times)
    events = []
    for number, (name, bars) in enumerate(_lanes(run.records, end).items(), start=1):
        events += _names(number, name, max((bar.row for bar in bars), default=0))
        for bar in bars:
            began = round((bar.start - start) * 1e6)
            event = {"ph": "i", "s": "p", "pid": number, "tid": bar.row, "cat": bar.kind}
            event |= {"name": bar.name, "ts": began, "args": bar.details}
            if bar.end is not None:
                # Ends are rounded and not durations, so that bars which touch do not overlap.
                event |= {"ph": "X", "dur": round((bar.end - start) * 1e6) - began}
            events.append(event)
    facts = {"start_unix_s": start, "duration_s": end - start}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": facts}


def _names(lane: int, name: str, last_row: int) -> list[dict]:
    """Return events that name a lane and its rows; both are shown in the order of their numbers."""
    rows = ROWS.get(name, WORKER_ROWS)
    rows = [*rows, *(f"slot {slot}" for slot in range(last_row + 1 - len(rows)))]
    labels = [("process_name", 0, name)]
    labels += [("thread_name", row, row_name) for row, row_name in enumerate(rows)]
    return [
        {"ph": "M", "pid": lane, "tid": row, "name": kind, "args": {"name": label}}
        for kind, row, label in labels
    ]


def _lanes(records: list[dict], end: float) -> dict[str, list[Bar]]:
    """Return the bars of each lane by its name."""
    lanes = {"trainer": _trainer(records), "evaluation": _evaluations(records)}
    if hosts := _hosts(records):
        lanes["remote hosts"] = hosts
    by_worker = defaultdict(list)
    for record in records:
        if "worker" in record:
            by_worker[record["node"], record["worker"]].append(record)
    for (node, worker), mine in sorted(by_worker.items()):
        number = f"{node}.{worker}" if node else worker
        host = next((f" ({record['machine']})" for record in mine if "machine" in record), "")
        lanes[f"worker {number}{host}"] = _worker(mine, bool(host), end)
    return lanes


def _trainer(records: list[dict]) -> list[Bar]:
    """Return the bars of the first node's steps, and of the trainer's states in them."""
    bars = []
    for record in records:
        if record["event"] == "step" and record["node"] == 0:
            details, spans = {"step": record["step"]}, record["spans"]
            name = f"step {record['step']}"
            bars.append(Bar(0, spans[0][1], spans[-1][2], "step", name, details))
            bars += [Bar(1, start, end, state, state, details) for state, start, end in spans]
    return bars


def _evaluations(records: list[dict]) -> list[Bar]:
    """Return a bar per evaluation, also for one that had not ended. A version may have several, one after another."""
    bars, responses = [], []
    for record in [*records, {"event": "evaluation"}]:
        if record["event"] == "trajectory" and record["group"] < 0:
            responses.append(record)
        elif record["event"] == "evaluation" and responses:
            version = record.get("version", responses[0].get("oldest_version"))
            details = {"version": version, "responses": len(responses)}
            details["accuracy"] = record.get("accuracy")
            start = min(response["started_at"] for response in responses)
            end = record.get("time", responses[-1]["time"])
            bars.append(Bar(0, start, end, "evaluation", f"evaluation v{version}", details))
            responses = []
    return bars


def _hosts(records: list[dict]) -> list[Bar]:
    """Return a mark per remote host that joined or left."""
    marks = []
    for record in records:
        if record["event"] in ("machine_joined", "machine_left"):
            moment = record["event"].removeprefix("machine_")
            name = f"{record['machine']} {moment}"
            details = _details(record, "why", "tickets")
            marks.append(Bar(0, record["time"], None, moment, name, details))
    return marks


def _details(record: dict, *names: str) -> dict:
    """Return the named fields that a record has."""
    return {name: record[name] for name in names if record.get(name) is not None}


def _worker(records: list[dict], is_remote: bool, last: float) -> list[Bar]:
    """Return the bars of a worker from its events. Without a reported end it lives until `last`."""
    bars, responses, changes = [], [], []
    up, down = ("joined", "left") if is_remote else ("started", "died")
    for record in records:
        time = record["time"]
        match record["event"]:
            case "worker_started" if is_remote:
                changes.append((time, "away", ""))
            case "worker_started" if record["attempt"] == 0:
                changes.append((time, "starting", ""))
            case "worker_state":
                changes += record["changes"]
            case "worker_time":
                last = record["until"]
            case "worker_ready":
                details = _details(record, "startup_s")
                bars.append(Bar(0, time, None, up, f"worker {up}", details))
            case "worker_died":
                details = _details(record, "exit_code", "tickets")
                bars.append(Bar(0, time, None, down, f"worker {down}", details))
                if is_remote:
                    last = time
                else:
                    changes.append((time, "restarting", ""))
            case "update":
                details = _details(record, "version", "pause_s")
                name = f"update v{record['version']}"
                bars.append(Bar(1, time - record["pause_s"], time, "update", name, details))
            case "trajectory":
                responses.append(record)
    return bars + _states(changes, last) + _responses(responses)


def _states(changes: list[tuple[float, str, str]], last: float) -> list[Bar]:
    """Return a bar per state from its changes (time, state, reason). The last state ends at `last`."""
    # A worker that restarts has a new clock. It can be behind the reported time of the death.
    times = list(accumulate((time for time, _, _ in changes), max))
    spans = pairwise([*times, last])
    return [
        Bar(0, start, end, state, state, {"why": reason} if reason else {})
        for (_, state, reason), (start, end) in zip(changes, spans, strict=True)
        if end > start
    ]


def _responses(records: list[dict]) -> list[Bar]:
    """Return a bar per response, each in the lowest row where it overlaps no other."""
    bars, ends = [], []
    for record in sorted(records, key=itemgetter("started_at")):
        start = record["started_at"]
        end = max(start, record["ended_at"])
        slot = next((slot for slot, until in enumerate(ends) if until <= start), len(ends))
        ends[slot : slot + 1] = [end]
        version = record.get("oldest_version")
        name = "no tokens" if version is None else f"v{version}"
        details = _details(record, *RESPONSE)
        bars.append(Bar(len(WORKER_ROWS) + slot, start, end, "response", name, details))
    return bars
