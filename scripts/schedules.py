"""Draw the same nine responses under three schedules: `python scripts/schedules.py` writes docs/schedules.png.

The controller is the real one, over the virtual cluster of extras/simulation. An engine samples three responses at a
time, a step trains on three, and one response is a straggler. Every bar is an event of that controller.
"""

import math
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter, itemgetter
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from asyncrl.config import Config
from asyncrl.records import Ticket
from extras.simulation.cluster import Case, Cluster, Simulation
from extras.simulation.engine import EngineCurve
from extras.simulation.workload import Workload
from scripts.lines import ROOT, run_command

SCHEDULES = {
    "α = 0: sampling and training take turns": {},
    "α = 1: training on a batch while the next is sampled": {"async_ratio": 1.0},
    "lag 2: α = 0, and weights arrive two steps late": {"publish_delay": 2},
}
"""Options of each panel, by its title."""
TOKENS = (8, 10, 6, 7, 9, 8, 9, 20, 6)
"""Lengths of the nine responses, tokens. A token takes a second."""
STRAGGLER = TOKENS.index(max(TOKENS))
LATER_TOKENS = 8
"""Length of every later response, tokens. It is drawn in grey."""
SLOTS = 3
NUM_STEPS = 3
"""Steps that train on the nine responses."""
TRAIN_S_PER_TOKEN = 0.25
SYNC_S = 1.0
EXPLANATION = (
    "The same nine responses under three schedules. A token has the colour of the version that wrote it, a step that "
    "of\nthe version that it trains. Staleness: number of versions from a response's oldest colour to that of its step."
)
COLOURS = ("#7FB0E0", "#FFB54D", "#7CC887")
"""Colours of the policy versions that train on the nine responses."""
GREY, MIDDLE_GREY, DARK = "#E3E3E3", "#777777", "#222222"
BAR = 0.74
"""Height of a bar, rows."""
MIN_LABELLED_S = 6.0
"""Shortest wait of the trainer that is labelled."""


class ChosenLengths:
    """Lengths of responses by their problem. It takes the place of a LengthLaw."""

    def draw(self, problem: int, ticket: Ticket) -> int:
        """Return the tokens of a response."""
        return TOKENS[problem] if problem < len(TOKENS) else LATER_TOKENS


@dataclass(frozen=True)
class Response:
    """One response, times in seconds."""

    number: int
    slot: int
    parts: tuple[tuple[int, float, float], ...]
    """(policy version, start, end) of each part, in order."""
    oldest_version: int
    """Version of its oldest token, by its trajectory."""

    @property
    def start(self) -> float:
        return self.parts[0][1]

    @property
    def end(self) -> float:
        return self.parts[-1][2]


@dataclass(frozen=True)
class Step:
    """One training step, times in seconds."""

    version: int
    """Policy version that trains."""
    responses: tuple[int, ...]
    start: float
    end: float


@dataclass(frozen=True)
class Schedule:
    """Events of one simulated run."""

    title: str
    config: Config
    responses: tuple[Response, ...]
    """By their number."""
    steps: tuple[Step, ...]
    loads: tuple[tuple[int, float], ...]
    """(policy version, time) of weights that the engine has loaded."""
    staleness: tuple[tuple[int, ...], ...]
    """Staleness of each step's responses, as the simulated trainer measures it."""

    @property
    def bound(self) -> str:
        """Return the bound on staleness with its terms."""
        alpha, delay = self.config.async_ratio, self.config.publish_delay
        return f"no token is older than ⌈α⌉ + K = {alpha:g} + {delay} = {self.config.max_staleness}"

    def age(self, number: int) -> int:
        """Return the staleness of a response when it is trained on, steps."""
        step = next(step for step in self.steps if number in step.responses)
        return step.version - self.responses[number].oldest_version


def simulated(title: str) -> Schedule:
    """Simulate a schedule and return its events."""
    common = {"groups_per_step": SLOTS, "group_size": 1, "advantage": "reinforce"}
    curve = EngineCurve(((1, 1.0), (SLOTS, 1.0)), 1e12, SLOTS)
    hardware = Cluster(curve, 1, train_s_per_token=TRAIN_S_PER_TOKEN, sync_s=SYNC_S)
    workload = Workload(ChosenLengths(), prompt_tokens=0)
    case = Case(common | SCHEDULES[title], workload, hardware, NUM_STEPS + 3, warmup=0)
    events = []
    simulation = Simulation(case, lambda event, **fields: events.append((event, fields)))
    simulation.run()
    loads = [(fields["version"], fields["time"]) for event, fields in events if event == "update"]
    ended = [fields for event, fields in events if event == "trajectory"]
    steps = [
        Step(fields["step"] - 1, tuple(fields["groups"]), *fields["spans"][0][1:])
        for event, fields in events
        if event == "step"
    ]
    staleness = tuple(step.staleness for step in simulation.steps)
    responses = tuple(_responses(ended, loads))
    return Schedule(title, simulation.config, responses, tuple(steps), tuple(loads), staleness)


def _responses(ended: list[dict], loads: list[tuple[int, float]]) -> list[Response]:
    """Return the responses by number, each in the lowest free slot. The engine pauses while it loads weights."""
    responses, free_at = [], [0.0] * SLOTS
    spans = [
        (version, loaded_at, next_at - SYNC_S)
        for (version, loaded_at), (_, next_at) in pairwise([*loads, (0, math.inf)])
    ]
    for event in sorted(ended, key=itemgetter("started_at", "group")):
        started_at, ended_at = event["started_at"], event["ended_at"]
        slot = next(slot for slot, until in enumerate(free_at) if until <= started_at)
        free_at[slot] = ended_at
        parts = tuple(
            (version, max(started_at, start), min(ended_at, end))
            for version, start, end in spans
            if max(started_at, start) < min(ended_at, end)
        )
        responses.append(Response(event["group"], slot, parts, event["oldest_version"]))
    return sorted(responses, key=attrgetter("number"))


# Drawing


def draw(schedules: list[Schedule], path: Path) -> None:
    """Draw a panel per schedule on one time axis."""
    figure = Figure(figsize=(10, 6.8), layout="constrained", facecolor="white")
    panels = figure.subplots(len(schedules), sharex=True)
    ends_at = max(schedule.steps[NUM_STEPS - 1].end for schedule in schedules) + SYNC_S
    for panel, schedule in zip(panels, schedules, strict=True):
        _draw_panel(panel, schedule)
        panel.set_xlim(0, ends_at + 1.5)
    panels[-1].set_xlabel("time, simulated seconds")
    versions = [Patch(color=colour, label=f"version {v}") for v, colour in enumerate(COLOURS)]
    loaded = Line2D([], [], color=DARK, linestyle=":", label="weights reach the engine")
    later = Patch(color=GREY, label="later responses, steps")
    figure.legend(
        handles=[*versions, loaded, later],
        loc="outside upper center",
        ncols=len(COLOURS) + 2,
        frameon=False,
        title=EXPLANATION,
    )
    figure.savefig(path, dpi=130)


def _draw_panel(panel: Axes, schedule: Schedule) -> None:
    oldest = max(schedule.age(number) for number in range(len(TOKENS)))
    panel.set_title(schedule.title, loc="left", fontweight="bold", fontsize=10)
    panel.set_title(f"{schedule.bound}; oldest here: {oldest}", loc="right", fontsize=9)
    for step in schedule.steps:
        _draw_step(panel, schedule, step)
    for response in schedule.responses:
        _draw_response(panel, schedule, response)
    for version, time in schedule.loads:
        panel.axvline(time, color=DARK, linewidth=0.9, linestyle=":")
        panel.text(time, -0.5, f" v{version}", fontsize=8.5, color=DARK, clip_on=True)
    rows = ["trainer", *(f"engine, slot {slot + 1}" for slot in range(SLOTS))]
    panel.set_yticks(range(len(rows)), rows)
    panel.set_ylim(SLOTS + 0.5, -1.0)
    panel.spines[["top", "right"]].set_visible(False)


def _draw_step(panel: Axes, schedule: Schedule, step: Step) -> None:
    """Draw a step, write its responses, and write before it which of them the trainer waited for."""
    if step.version >= NUM_STEPS:
        panel.barh(0, step.end - step.start, BAR, step.start, color=GREY)
        return
    panel.barh(0, step.end - step.start, BAR, step.start, color=COLOURS[step.version])
    numbers = " ".join(str(number + 1) for number in step.responses)
    _write(panel, 0, step.start, step.end, f"step {step.version + 1}: {numbers}")
    last = max(step.responses, key=lambda number: schedule.responses[number].end)
    earlier = [other.end for other in schedule.steps if other.end < step.start]
    waits_from = max(earlier, default=0.0) + SYNC_S
    if step.start - waits_from > MIN_LABELLED_S:
        _write(panel, 0, waits_from, step.start, f"waits for {last + 1}", MIDDLE_GREY)


def _draw_response(panel: Axes, schedule: Schedule, response: Response) -> None:
    """Draw a response in one frame, with a gap while the engine loads weights."""
    is_shown, row = response.number < len(TOKENS), response.slot + 1
    for version, start, end in response.parts:
        style = {"color": COLOURS[version]} if is_shown else {"color": GREY, "edgecolor": "white"}
        panel.barh(row, end - start, BAR, start, **style)
    if not is_shown:
        return
    frame = {"color": "none", "edgecolor": DARK, "linewidth": 0.8}
    panel.barh(row, response.end - response.start, BAR, response.start, **frame)
    label = str(response.number + 1)
    if response.number == STRAGGLER:
        age = schedule.age(response.number)
        label += f", the straggler: {age} {'step' if age == 1 else 'steps'} stale"
    _, start, end = max(response.parts, key=lambda part: part[2] - part[1])
    _write(panel, row, start, end, label)


def _write(panel: Axes, row: int, start: float, end: float, text: str, color: str = DARK) -> None:
    style = {"ha": "center", "va": "center", "fontsize": 8.5, "color": color}
    panel.text((start + end) / 2, row, text, **style)


def main(out: Path = ROOT / "docs" / "schedules.png") -> None:
    """Simulate the schedules and draw them.

    Args:
        out: File of the figure.
    """
    draw([simulated(title) for title in SCHEDULES], out)
    print(out)


if __name__ == "__main__":
    run_command(main)
