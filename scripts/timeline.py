"""The events of a run in the Chrome trace-event format: report.py draws them, and https://ui.perfetto.dev opens them.

A process of the trace is a lane, and its threads are rows. Lanes are the trainer (steps, and its states in each), the
evaluations, the remote hosts if any joined, and every worker (its states, its updates, and its responses in as many
rows as ran at the same time). A worker's states follow on each other without a gap. A worker on a remote host reports
no states, and has one bar from its start to its end.
"""

import heapq
from collections import defaultdict
from datetime import datetime
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import pandas as pd

from scripts.runs import Run, rows

ROWS = {"trainer": ["steps", "states"], "evaluation": ["evaluations"], "remote hosts": ["hosts"]}
"""Names of a lane's rows. All other lanes are of workers."""
WORKER_ROWS = ["states", "updates"]
"""Names of a worker's first rows. Its other rows are slots for responses."""
RESPONSE = (
    "ticket",
    "group",
    "member",
    "tokens",
    "min_version",
    "max_version",
    "reward",
    "finish_reason",
    "failure",
)
"""What a bar of a response says."""


class Bar(NamedTuple):
    """Something that took time, or a moment. Bars of one row do not overlap."""

    row: int
    start: float
    """Unix time, seconds."""
    end: float | None
    """Unix time, seconds. None for a moment."""
    kind: str
    """`response`, `evaluation`, `step`, `update`, `hosts`, `away` (on a remote host), a state of
    asyncrl/runlog/time_ledger.py, or of a moment `started`, `died`, `joined` or `left`."""
    name: str
    """Its label. A response is labelled by its oldest version, because Perfetto colours bars by their names."""
    details: dict


def trace(run: Run) -> dict:
    """Return the events of a run as a trace. Its times are µs since the run's start."""
    times = [time for table in run.events.values() for time in table["time"]]
    times.append(datetime.fromisoformat(run.info["started_at"]).timestamp())
    start, end = min(times), max(times)

    def since_start(time: float) -> int:
        return round((time - start) * 1e6)

    events = []
    for lane, (name, bars) in enumerate(_lanes(run.events, end).items(), start=1):
        events += _names(lane, name, max((bar.row for bar in bars), default=0))
        for bar in bars:
            event = {"ph": "i", "s": "p", "pid": lane, "tid": bar.row, "cat": bar.kind}
            event |= {"name": bar.name, "ts": since_start(bar.start), "args": bar.details}
            if bar.end is not None:
                # Ends are rounded and not durations, so that bars which touch do not overlap.
                event |= {"ph": "X", "dur": since_start(bar.end) - event["ts"]}
            events.append(event)
    facts = {"start_unix_s": start, "duration_s": end - start}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": facts}


def _names(lane: int, name: str, last_row: int) -> list[dict]:
    """Return events that name a lane and its rows, and keep them in order."""
    names = ROWS.get(name, WORKER_ROWS)
    names = [*names, *(f"slot {slot}" for slot in range(last_row + 1 - len(names)))]
    facts = [("process_name", 0, name), ("process_sort_index", 0, lane)]
    facts += [("thread_name", row, name) for row, name in enumerate(names)]
    facts += [("thread_sort_index", row, row) for row in range(len(names))]
    return [
        {"ph": "M", "name": fact, "pid": lane, "tid": row, "args": {fact.partition("_")[2]: value}}
        for fact, row, value in facts
    ]


def _lanes(events: dict[str, pd.DataFrame], end: float) -> dict[str, list[Bar]]:
    lanes = {
        "trainer": _trainer(events["step"]),
        "evaluation": _evaluations(events["evaluation"], events["trajectory"]),
    }
    if changes := rows(events["machine_joined"]) + rows(events["machine_left"]):
        lanes["remote hosts"] = _hosts(sorted(changes, key=lambda event: event["time"]), end)
    of_workers = defaultdict(list)
    for event in (event for table in events.values() for event in rows(table)):
        if "worker" in event:
            of_workers[event["node"], event["worker"]].append(event)
    for (node, worker), of_worker in sorted(of_workers.items()):
        of_worker.sort(key=lambda event: event["time"])
        number = f"{node}.{worker}" if node else worker
        host = next((f" ({event['machine']})" for event in of_worker if "machine" in event), "")
        lanes[f"worker {number}{host}"] = _worker(of_worker, bool(host), end)
    return lanes


def _trainer(steps: pd.DataFrame) -> list[Bar]:
    bars = []
    for event in rows(steps):
        if event["node"] == 0:
            details, spans = {"step": event["step"]}, event["spans"]
            bars.append(Bar(0, spans[0][1], spans[-1][2], "step", f"step {event['step']}", details))
            bars += [Bar(1, start, end, state, state, details) for state, start, end in spans]
    return bars


def _evaluations(ended: pd.DataFrame, responses: pd.DataFrame) -> list[Bar]:
    """Return a bar per evaluation, also for one that had not ended. A version may have several, one after another."""
    bars = []
    if len(responses):
        responses = responses[responses["group"] < 0]
        which = np.searchsorted([event["time"] for event in rows(ended)], responses["time"])
        for index, of_one in responses.groupby(which):
            event = {"time": of_one["time"].max(), "version": int(of_one["min_version"].iloc[0])}
            if index < len(ended):
                event = rows(ended)[index]
            details = {"version": event["version"], "responses": len(of_one)}
            details["accuracy"] = event.get("accuracy")
            name = f"evaluation v{event['version']}"
            start = of_one["started_at"].min()
            bars.append(Bar(0, start, event["time"], "evaluation", name, details))
    return bars


def _hosts(changes: list[dict], end: float) -> list[Bar]:
    """Return a mark per join and leave, and between them how many hosts there were."""
    bars, num_hosts = [], 0
    for event, until in zip(changes, [*(event["time"] for event in changes[1:]), end], strict=True):
        moment = event["event"].removeprefix("machine_")
        num_hosts += 1 if moment == "joined" else -1
        details = {name: event[name] for name in ("why", "tickets") if name in event}
        bars.append(Bar(0, event["time"], None, moment, f"{event['machine']} {moment}", details))
        if num_hosts:
            bars.append(Bar(0, event["time"], until, "hosts", f"remote hosts: {num_hosts}", {}))
    return bars


def _worker(events: list[dict], is_remote: bool, end: float) -> list[Bar]:
    """Return the bars of a worker from its events, sorted by time. Without a reported end it lives to the run's."""
    bars, responses, changes, last = [], [], [], end
    up, down = ("joined", "left") if is_remote else ("started", "died")
    for event in events:
        time = event["time"]
        match event["event"]:
            case "worker_started" if is_remote:
                changes.append((time, "away", ""))
            case "worker_started" if event["attempt"] == 0:
                changes.append((time, "starting", ""))
            case "worker_state":
                changes += event["changes"]
            case "worker_time":
                last = event["until"]
            case "worker_ready":
                details = {"startup_s": event["startup_s"]}
                bars.append(Bar(0, time, None, up, f"worker {up}", details))
            case "worker_died":
                details = {name: event[name] for name in ("exit_code", "tickets") if name in event}
                bars.append(Bar(0, time, None, down, f"worker {down}", details))
                if is_remote:
                    last = time
                else:
                    changes.append((time, "restarting", ""))
            case "update":
                details = {name: event[name] for name in ("version", "pause_s")}
                name = f"update v{event['version']}"
                bars.append(Bar(1, time - event["pause_s"], time, "update", name, details))
            case "trajectory":
                responses.append(event)
    return bars + _states(changes, last) + _responses(responses)


def _states(changes: list[tuple[float, str, str]], last: float) -> list[Bar]:
    """Return a bar per state from its changes (time, state, reason). The last state ends at `last`."""
    # A worker that restarts has a new clock, which may be behind the reported time of the death.
    times = list(accumulate((time for time, _, _ in changes), max))
    spans = pairwise([*times, last])
    return [
        Bar(0, start, end, state, state, {"why": reason} if reason else {})
        for (_, state, reason), (start, end) in zip(changes, spans, strict=True)
        if end > start
    ]


def _responses(events: list[dict]) -> list[Bar]:
    """Return a bar per response, each in the lowest row where it overlaps no other."""
    bars, free, busy = [], [], []  # heaps of rows, and of (end, row)
    for event in sorted(events, key=lambda event: event["started_at"]):
        start = event["started_at"]
        end = max(start, event["ended_at"])
        while busy and busy[0][0] <= start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        row = heapq.heappop(free) if free else len(WORKER_ROWS) + len(busy)
        heapq.heappush(busy, (end, row))
        details = {name: event[name] for name in RESPONSE if name in event}
        name = f"v{event['min_version']}" if "min_version" in event else "no tokens"
        bars.append(Bar(row, start, end, "response", name, details))
    return bars
