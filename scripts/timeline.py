"""The events of a run as lanes of bars: what report.py draws, and what Perfetto opens as trace.json.

Lanes are the trainer (steps, and its states in each), the evaluations, the machines that joined, if any did, and every
worker (its states, its updates, and below that all its trajectories, in as many rows as ran at the same time). States
are those of asyncrl/runlog/time_ledger.py and follow on each other without a gap; an engine of a machine that joined
keeps no time ledger, and has one bar from when it was up to its end. Times are seconds since the run's start.
"""

import heapq
import itertools
from dataclasses import dataclass, field
from datetime import datetime

from scripts.runs import Run, rows

TRAJECTORY_FIELDS = (
    "ticket", "group", "member", "tokens", "min_version", "max_version", "reward", "finish_reason", "failure",
)  # fmt: skip
"""What the event of a trajectory says besides its worker and its times; the last one only if it failed."""
STATE_COLORS = {
    "wait": "#b7bfcc", "gather": "#6fb1e8", "forward_backward": "#2f6fb5", "optimizer": "#1d3f72", "publish": "#e08b2c",
    "evaluate": "#e3b505", "save": "#3d9970", "other": "#8d6cc4", "starting": "#c9b8a2", "decoding": "#3f83cc",
    "environment": "#3d9970", "starved": "#7a4a1e", "gated": "#b7bfcc", "paused": "#e08b2c", "restarting": "#e57373",
}  # fmt: skip
"""Of the states in asyncrl/runlog/time_ledger.py."""
MOMENTS = ("started", "died", "joined", "left")


@dataclass(frozen=True)
class Bar:
    """Something that took time, or a moment: bars of one row do not overlap."""

    row: int
    start: float
    end: float
    kind: str
    """`trajectory`, `evaluation`, `step`, `update`, `machines`, `away` (on a machine that joined), a state of
    asyncrl/runlog/time_ledger.py, or one of MOMENTS."""
    name: str
    """Its label; that of a trajectory is its oldest version, as Perfetto colours bars by their name."""
    details: dict

    def data(self) -> list:
        """The bar for the page's script: row, start, end, then the fields of a trajectory, or a kind and a text."""
        span = [self.row, round(self.start, 4), round(self.end, 4)]
        if self.kind == "trajectory":
            values = [self.details.get(name) for name in TRAJECTORY_FIELDS]
            return [*span, *(values if values[-1] else values[:-1])]
        values = {
            key: f"{value:.4g}" if isinstance(value, float) else value
            for key, value in self.details.items()
        }
        text = [self.name, *(f"{key.replace('_', ' ')}: {value}" for key, value in values.items())]
        return [*span, self.kind, "\n".join(text)]


@dataclass
class Lane:
    """One process of the run."""

    name: str
    row_names: list[str]
    """Names of the first rows; the others are slots for trajectories."""
    bars: list[Bar] = field(default_factory=list)
    marks: list[Bar] = field(default_factory=list)
    """Moments."""

    @property
    def num_rows(self) -> int:
        """Rows, at least those that have a name."""
        return max([len(self.row_names), *(bar.row + 1 for bar in self.bars)])

    def data(self) -> dict:
        """The lane for the page's script."""
        bars = [
            [bar.data() for bar in self.bars if (bar.kind == "trajectory") is is_one]
            for is_one in (False, True)
        ]
        marks = [
            [start, kind, text] for _, start, _, kind, text in (mark.data() for mark in self.marks)
        ]
        shape = {"name": self.name, "named_rows": len(self.row_names), "rows": self.num_rows}
        return shape | {"bars": bars[0], "trajectories": bars[1], "marks": marks}


@dataclass(frozen=True)
class Timeline:
    """All lanes, the trainer's first."""

    start: float
    """Unix time, seconds."""
    duration: float
    """From the start of the run to its last event, seconds."""
    lanes: list[Lane]


def build_timeline(run: Run) -> Timeline:
    """Lay out the events of a run."""
    started = datetime.fromisoformat(run.info["started_at"]).timestamp()
    times = [started, *(time for events in run.events.values() for time in events["time"])]
    start, end = min(times), max(times)
    of_kind = {
        kind: [_since(start, event) for event in rows(events)]
        for kind, events in run.events.items()
    }
    lanes = [_trainer(of_kind.get("step", []))]
    lanes.append(_evaluations(of_kind.get("evaluation", []), of_kind.get("trajectory", [])))
    if comings := of_kind.get("machine_joined", []) + of_kind.get("machine_left", []):
        lanes.append(_machines(sorted(comings, key=lambda event: event["time"]), end - start))
    of_worker: dict[tuple[int, int], dict[str, list[dict]]] = {}
    for kind, events in of_kind.items():
        for event in (event for event in events if "worker" in event):
            of_worker.setdefault((event["node"], event["worker"]), {}).setdefault(kind, []).append(
                event
            )
    for (node, worker), mine in sorted(of_worker.items()):
        name = f"worker {node}.{worker}" if node else f"worker {worker}"
        name += "".join(
            f" ({event['machine']})"
            for event in mine.get("worker_started", [])
            if "machine" in event
        )
        lanes.append(_worker(name, mine, end - start))
    return Timeline(start, end - start, lanes)


def _since(start: float, event: dict) -> dict:
    """The event with its Unix times as seconds since `start`."""
    moved = {
        name: event[name] - start
        for name in ("time", "started_at", "ended_at", "until")
        if name in event
    }
    moved["spans"] = [
        (state, *(time - start for time in span)) for state, *span in event.get("spans", [])
    ]
    moved["changes"] = [
        (time - start, state, reason) for time, state, reason in event.get("changes", [])
    ]
    return event | moved


def _trainer(steps: list[dict]) -> Lane:
    lane = Lane("trainer", ["steps", "states"])
    for event in (event for event in steps if event["node"] == 0):
        details, spans = {"step": event["step"]}, event["spans"]
        lane.bars.append(
            Bar(0, spans[0][1], spans[-1][2], "step", f"step {event['step']}", details)
        )
        lane.bars += [Bar(1, start, end, state, state, details) for state, start, end in spans]
    return lane


def _evaluations(ended: list[dict], trajectories: list[dict]) -> Lane:
    """A bar per evaluation. They follow one another, and a version may have several."""
    lane, responses = Lane("evaluation", ["evaluations"]), []

    def add(end: float, version: int | None, accuracy: float | None) -> None:
        start = min(event["started_at"] for event in responses)
        details = {"version": version, "responses": len(responses), "accuracy": accuracy}
        lane.bars.append(Bar(0, start, end, "evaluation", f"evaluation v{version}", details))
        responses.clear()

    of_evaluations = [event for event in trajectories if event["group"] < 0]
    for event in sorted([*of_evaluations, *ended], key=lambda event: event["time"]):
        if event["event"] == "trajectory":
            responses.append(event)
        elif responses:
            add(event["time"], event["version"], event.get("accuracy"))
    if responses:  # the run ended before the evaluation did
        add(responses[-1]["time"], responses[0].get("min_version"), None)
    return lane


def _machines(comings: list[dict], end: float) -> Lane:
    """A mark per join and leave, and between them how many machines there were."""
    lane, num_there = Lane("machines", ["machines"]), 0
    for event, until in zip(comings, [*(event["time"] for event in comings[1:]), end], strict=True):
        start, moment = event["time"], event["event"].removeprefix("machine_")
        details = {name: event[name] for name in ("why", "tickets") if name in event}
        lane.marks.append(Bar(0, start, start, moment, f"{event['machine']} {moment}", details))
        num_there += 1 if moment == "joined" else -1
        if num_there and until > start:
            lane.bars.append(Bar(0, start, until, "machines", f"{num_there} there", {}))
    return lane


def _worker(name: str, mine: dict[str, list[dict]], end: float) -> Lane:
    lane = Lane(name, ["states", "updates"], _states(mine, end))
    for event in mine.get("update", []):
        version, pause_s, end = event["version"], event["pause_s"], event["time"]
        details = {"version": version, "pause_s": pause_s}
        lane.bars.append(Bar(1, end - pause_s, end, "update", f"update v{version}", details))
    ordered = sorted(mine.get("trajectory", []), key=lambda event: event["started_at"])
    spans = [
        (event["started_at"], max(event["started_at"], event["ended_at"])) for event in ordered
    ]
    for event, span, row in zip(ordered, spans, pack(spans), strict=True):
        details = {name: event[name] for name in TRAJECTORY_FIELDS if name in event}
        label = f"v{event['min_version']}" if "min_version" in event else "no tokens"
        lane.bars.append(Bar(row + 2, *span, "trajectory", label, details))
    up, down = (
        ("joined", "left") if lane.bars and lane.bars[0].kind == "away" else ("started", "died")
    )
    for kind, moment, told in (
        ("ready", up, ("startup_s",)),
        ("died", down, ("exit_code", "tickets")),
    ):
        for event in mine.get(f"worker_{kind}", []):
            details = {name: event[name] for name in told if name in event}
            lane.marks.append(
                Bar(0, event["time"], event["time"], moment, f"worker {moment}", details)
            )
    return lane


def _states(mine: dict[str, list[dict]], end: float) -> list[Bar]:
    """A bar per state of a worker, from its first start to what is known last; without an end, to the run's."""
    changes, last = [], end
    kinds = ("worker_started", "worker_state", "worker_died", "worker_time")
    for event in sorted(
        (event for kind in kinds for event in mine.get(kind, [])), key=lambda event: event["time"]
    ):
        match event["event"]:
            case "worker_started" if "machine" in event:
                changes.append((event["time"], "away", ""))
            case "worker_died" if changes and changes[0][1] == "away":
                last = event["time"]
            case "worker_started" if not event["attempt"]:
                changes.append((event["time"], "starting", ""))
            case "worker_state":
                changes += event["changes"]
            case "worker_died" if changes:
                changes.append((event["time"], "restarting", ""))
            case "worker_time":
                last = event["until"]
    # clocks differ where a process ends
    times = list(itertools.accumulate((time for time, _, _ in changes), max))
    ends = [*times[1:], max(times[-1], last)] if times else []
    return [
        Bar(0, start, stop, state, state, {"why": reason} if reason else {})
        for (_, state, reason), start, stop in zip(changes, times, ends, strict=True)
        if stop > start
    ]


def pack(spans: list[tuple[float, float]]) -> list[int]:
    """The row of each span (start, end), sorted by start: the lowest in which it overlaps none."""
    free: list[int] = []
    busy: list[tuple[float, int]] = []  # end, row
    of_spans = []
    for start, end in spans:
        while busy and busy[0][0] <= start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        of_spans.append(heapq.heappop(free) if free else len(busy))
        heapq.heappush(busy, (end, of_spans[-1]))
    return of_spans


def trace(timeline: Timeline) -> dict:
    """The timeline in the Chrome trace-event format: a process per lane, a thread per row, times in µs."""
    events = []
    for pid, lane in enumerate(timeline.lanes, start=1):
        slots = [f"slot {i}" for i in range(lane.num_rows - len(lane.row_names))]
        named = [
            ("process_name", 0, {"name": lane.name}),
            ("process_sort_index", 0, {"sort_index": pid}),
        ]
        named += [
            ("thread_name", tid, {"name": row}) for tid, row in enumerate([*lane.row_names, *slots])
        ]
        named += [("thread_sort_index", tid, {"sort_index": tid}) for tid in range(lane.num_rows)]
        events += [
            {"ph": "M", "name": name, "pid": pid, "tid": tid, "args": args}
            for name, tid, args in named
        ]
        for bar in [*lane.bars, *lane.marks]:
            # Ends are rounded, not durations, so that bars which touch do not overlap.
            start, end = round(bar.start * 1e6), round(bar.end * 1e6)
            form = (
                {"ph": "i", "s": "p"}
                if bar.kind in MOMENTS
                else {"ph": "X", "dur": max(0, end - start)}
            )
            event = {
                "name": bar.name,
                "cat": bar.kind,
                "ts": start,
                "pid": pid,
                "tid": bar.row,
                "args": bar.details,
            }
            events.append(event | form)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"start_unix_s": timeline.start},
    }
