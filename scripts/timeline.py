"""The events of a run as lanes of bars: what report.py draws, and what Perfetto opens as trace.json.

Lanes are the trainer (steps, and its states in each), the evaluations, and every worker (its states, its updates, and
below that all its trajectories, in as many rows as ran at the same time). States are those of records/time_ledger.py
and follow on each other without a gap. Times are seconds since the run's start.
"""

import heapq
import itertools
from collections import defaultdict
from dataclasses import dataclass, field
from datetime import datetime

EVALUATION_GROUP = -1
"""group of the trajectories of an evaluation, as in data/records.py, which needs numpy."""
TRAJECTORY_FIELDS = (
    "ticket", "group", "member", "tokens", "min_version", "max_version", "reward", "finish_reason", "failure",
)  # fmt: skip
"""What the event of a trajectory says besides its worker and its times; the last one only if it failed."""
STATE_COLORS = {
    "wait": "#b7bfcc", "gather": "#6fb1e8", "forward_backward": "#2f6fb5", "optimizer": "#1d3f72", "publish": "#e08b2c",
    "evaluate": "#e3b505", "save": "#3d9970", "other": "#8d6cc4", "starting": "#c9b8a2", "decoding": "#3f83cc",
    "environment": "#3d9970", "starved": "#d32020", "gated": "#b7bfcc", "paused": "#e08b2c", "restarting": "#e57373",
}  # fmt: skip
"""Of the states in records/time_ledger.py."""


@dataclass(frozen=True)
class Bar:
    """Something that took time."""

    row: int
    """Row of its lane; the bars of one row do not overlap."""
    start: float
    end: float
    kind: str
    """`trajectory`, `evaluation`, `step`, `update`, or a state of records/time_ledger.py."""
    details: dict


@dataclass(frozen=True)
class Mark:
    """A moment."""

    time: float
    kind: str
    """`started` or `died`."""
    details: dict


@dataclass
class Lane:
    """One process of the run."""

    name: str
    row_names: list[str]
    """Names of the first rows; the others are slots for trajectories."""
    bars: list[Bar] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        """Rows, at least those that have a name."""
        return max([len(self.row_names), *(bar.row + 1 for bar in self.bars)])


@dataclass(frozen=True)
class Timeline:
    """All lanes, the trainer's first."""

    start: float
    """Unix time, seconds."""
    duration: float
    """From the start of the run to its last event, seconds."""
    lanes: list[Lane]


def build_timeline(run: dict, events: list[dict]) -> Timeline:
    """Lay out the `events` of a run whose run.json is `run`."""
    started = datetime.fromisoformat(run["started_at"]).timestamp()
    start, end = min([started, *map(_first_moment, events)]), max([started, *(event["time"] for event in events)])
    of_kind: dict[str, list[dict]] = defaultdict(list)
    for event in events:
        of_kind[event["event"]].append(_since(start, event))
    of_nodes = {event["worker"] for event in events if "worker" in event}
    workers = sorted(of_nodes, key=lambda worker: (isinstance(worker, str), worker))  # those of other nodes come last
    lanes = [_trainer(of_kind["step"]), _evaluations(of_kind["evaluation"], of_kind["trajectory"])]
    lanes += [_worker(index, of_kind, end - start) for index in workers]
    return Timeline(start, end - start, lanes)


def _first_moment(event: dict) -> float:
    """When what an event tells of began, Unix seconds."""
    match event["event"]:
        case "trajectory":
            return event["started_at"]
        case "worker_ready":
            return event["time"] - event["startup_s"]
        case "step":
            return event["spans"][0][1]
    return event["time"]


def _since(start: float, event: dict) -> dict:
    """The event with its Unix times as seconds since `start`."""
    moved = {name: event[name] - start for name in ("time", "started_at", "ended_at", "until") if name in event}
    if "spans" in event:
        moved["spans"] = [(state, *(time - start for time in span)) for state, *span in event["spans"]]
    if "changes" in event:
        moved["changes"] = [(time - start, state, reason) for time, state, reason in event["changes"]]
    return event | moved


def _trainer(steps: list[dict]) -> Lane:
    lane = Lane("trainer", ["steps", "states"])
    for event in steps:
        details, spans = {"step": event["step"]}, event["spans"]
        lane.bars.append(Bar(0, spans[0][1], spans[-1][2], "step", details))
        lane.bars += [Bar(1, start, end, state, details) for state, start, end in spans]
    return lane


def _evaluations(ended: list[dict], trajectories: list[dict]) -> Lane:
    """A bar per evaluation. They follow one another, and a version may have several."""
    lane = Lane("evaluation", ["evaluations"])
    responses: list[dict] = []
    of_evaluations = [event for event in trajectories if event["group"] == EVALUATION_GROUP]
    for event in sorted([*of_evaluations, *ended], key=lambda event: event["time"]):
        if event["event"] == "trajectory":
            responses.append(event)
        elif responses:
            lane.bars.append(_evaluation(responses, event["time"], event["version"], event["accuracy"]))
            responses = []
    if responses:  # the run ended before the evaluation did
        lane.bars.append(_evaluation(responses, responses[-1]["time"], responses[0].get("min_version"), None))
    return lane


def _evaluation(responses: list[dict], end: float, version: int | None, accuracy: float | None) -> Bar:
    details = {"version": version, "responses": len(responses), "accuracy": accuracy}
    return Bar(0, min(event["started_at"] for event in responses), end, "evaluation", details)


def _worker(index: int | str, of_kind: dict[str, list[dict]], end: float) -> Lane:
    mine = {kind: [e for e in events if e.get("worker") == index] for kind, events in of_kind.items()}
    lane = Lane(f"worker {index}", ["states", "updates"])
    life = [event for kind in _LIFE for event in mine.get(kind, [])]
    lane.bars += _states(sorted(life, key=lambda event: event["time"]), end)
    for event in mine.get("update", []):
        details = {"version": event["version"], "pause_s": event["pause_s"]}
        lane.bars.append(Bar(1, event["time"] - event["pause_s"], event["time"], "update", details))
    lane.bars += _slots(mine.get("trajectory", []))
    for event in mine.get("worker_ready", []):
        lane.marks.append(Mark(event["time"], "started", {"startup_s": event["startup_s"]}))
    for event in mine.get("worker_died", []):
        details = {"exit_code": event["exit_code"], "tickets": event["tickets"]}
        lane.marks.append(Mark(event["time"], "died", details))
    return lane


_LIFE = ("worker_started", "worker_state", "worker_died", "worker_time")
"""Events that tell in which state a worker is."""


def _states(life: list[dict], end: float) -> list[Bar]:
    """A bar per state of a worker, from its first start to what is known last; without an end, to the run's."""
    changes, last = [], end
    for event in life:
        match event["event"]:
            case "worker_started" if not event["attempt"]:
                changes.append((event["time"], "starting", ""))
            case "worker_state":
                changes += event["changes"]
            case "worker_died" if changes:
                changes.append((event["time"], "restarting", ""))
            case "worker_time":
                last = event["until"]
    times = list(itertools.accumulate((time for time, _, _ in changes), max))  # clocks differ where a process ends
    ends = [*times[1:], max(times[-1], last)] if times else []
    return [
        Bar(0, start, stop, state, {"why": reason} if reason else {})
        for (_, state, reason), start, stop in zip(changes, times, ends, strict=True)
        if stop > start
    ]


def _slots(trajectories: list[dict]) -> list[Bar]:
    """A bar per trajectory, in rows below those that have a name."""
    ordered = sorted(trajectories, key=lambda event: event["started_at"])
    spans = [(event["started_at"], max(event["started_at"], event["ended_at"])) for event in ordered]
    return [
        Bar(row + 2, start, end, "trajectory", {name: event[name] for name in TRAJECTORY_FIELDS if name in event})
        for event, (start, end), row in zip(ordered, spans, pack(spans), strict=True)
    ]


def pack(spans: list[tuple[float, float]]) -> list[int]:
    """The row of each span (start, end), sorted by start: the lowest in which it overlaps none."""
    free: list[int] = []
    busy: list[tuple[float, int]] = []  # end, row
    rows = []
    for start, end in spans:
        while busy and busy[0][0] <= start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        rows.append(heapq.heappop(free) if free else len(busy))
        heapq.heappush(busy, (end, rows[-1]))
    return rows


def trace(timeline: Timeline) -> dict:
    """The timeline in the Chrome trace-event format: a process per lane, a thread per row, times in µs."""
    events = []
    for pid, lane in enumerate(timeline.lanes, start=1):
        events += _names(pid, lane)
        for bar in lane.bars:
            ts = _microseconds(bar.start)
            # Ends are rounded, not durations, so that bars which touch do not overlap.
            span = {"ph": "X", "ts": ts, "dur": max(0, _microseconds(bar.end) - ts), "pid": pid, "tid": bar.row}
            events.append({"name": bar_name(bar), "cat": bar.kind, **span, "args": bar.details})
        for mark in lane.marks:
            moment = {"ph": "i", "s": "p", "ts": _microseconds(mark.time), "pid": pid, "tid": 0}
            events.append({"name": f"worker {mark.kind}", "cat": mark.kind, **moment, "args": mark.details})
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"start_unix_s": timeline.start}}


def _names(pid: int, lane: Lane) -> list[dict]:
    """What Perfetto calls the lane and its rows, and their order."""
    rows = [*lane.row_names, *(f"slot {i}" for i in range(lane.num_rows - len(lane.row_names)))]
    named = [("process_name", 0, {"name": lane.name}), ("process_sort_index", 0, {"sort_index": pid})]
    for tid, row in enumerate(rows):
        named += [("thread_name", tid, {"name": row}), ("thread_sort_index", tid, {"sort_index": tid})]
    return [{"ph": "M", "name": name, "pid": pid, "tid": tid, "args": args} for name, tid, args in named]


def bar_name(bar: Bar) -> str:
    """Its label; that of a trajectory is its oldest version, as Perfetto colours bars by their name."""
    details = bar.details
    match bar.kind:
        case "step":
            return f"step {details['step']}"
        case "update" | "evaluation":
            return f"{bar.kind} v{details['version']}"
        case "trajectory":
            return f"v{details['min_version']}" if "min_version" in details else "no tokens"
    return bar.kind


def _microseconds(seconds: float) -> int:
    return round(seconds * 1e6)
