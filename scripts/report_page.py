"""The page that report.py writes: curves as inline SVG, tables, samples, and the timeline's data for its script.

The frame, the style and the script are in report_page.html. All that a run has written is escaped on its way here.
"""

import json
import math
from dataclasses import dataclass
from html import escape
from pathlib import Path
from string import Template

from scripts.timeline import STATE_COLORS, TRAJECTORY_FIELDS, Bar, Lane, Timeline, bar_name

TEMPLATE = Path(__file__).with_name("report_page.html")
WIDTH, HEIGHT = 460, 230
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 10, 34
"""Margins of a chart around its axes, like its size in px."""


@dataclass(frozen=True)
class Series:
    """One curve."""

    name: str
    color: str
    points: list[tuple[float, float]]
    marked: bool = False
    """Whether each point is drawn, as for rare measurements."""


@dataclass(frozen=True)
class Chart:
    """One pair of axes."""

    title: str
    x_label: str
    series: list[Series]


@dataclass(frozen=True)
class Table:
    """A table: the first cell of a row is its name, the others are numbers. The last row is the sum."""

    title: str
    headings: list[str]
    rows: list[list[str]]
    note: str


@dataclass(frozen=True)
class Page:
    """All that the page shows, as plain text and numbers."""

    title: str
    facts: dict[str, str]
    numbers: dict[str, str]
    charts: list[Chart]
    missing: list[str]
    """Charts that the run has no metrics for."""
    timeline: Timeline | None
    """None leaves it out."""
    tables: list[Table]
    samples: list[dict]


def render(page: Page) -> str:
    """The page as HTML that needs nothing but itself."""
    timeline = page.timeline or Timeline(0.0, 0.0, [])
    data = {"charts": [_chart_data(chart) for chart in page.charts], "timeline": _timeline_data(timeline)}
    return Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        title=escape(page.title),
        facts="\n".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in page.facts.items()),
        numbers="\n".join(_tile(label, value) for label, value in page.numbers.items()),
        charts="\n".join(_figure(index, chart) for index, chart in enumerate(page.charts)),
        missing=escape(f"Not recorded by this run: {'; '.join(page.missing)}.") if page.missing else "",
        timeline_state="" if page.timeline else "hidden",
        tables="\n".join(map(_table, page.tables)),
        samples="\n".join(map(_sample, page.samples)) or "<p>No sample has been recorded.</p>",
        data=_script_json(data),
    )


def _script_json(data) -> str:
    """JSON that no HTML parser can mistake for the end of the script around it."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _tile(label: str, value: str) -> str:
    return f"<div class='tile'><b>{escape(value)}</b><span>{escape(label)}</span></div>"


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(heading)}</th>" for heading in table.headings)
    rows = "\n".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows)
    return (
        f"<section class='card'><h3>{escape(table.title)}</h3><table><thead><tr>{head}</tr></thead>"
        f"<tbody>{rows}</tbody></table><p class='note'>{escape(table.note)}</p></section>"
    )


def _sample(sample: dict) -> str:
    texts = {name: escape(str(sample.get(name, ""))) for name in ("prompt", "response")}
    others = {escape(name): escape(str(value)) for name, value in sample.items() if name not in texts}
    facts = "".join(f"<span><b>{name}</b> {value}</span>" for name, value in others.items())
    return (
        f"<article class='card sample'><header>{facts}</header>"
        f"<pre class='prompt'>{texts['prompt']}</pre><pre>{texts['response']}</pre></article>"
    )


# Curves


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers, about `count` of them, within low … high."""
    exact = (high - low) / count
    magnitude = 10 ** math.floor(math.log10(exact))
    step = next(factor * magnitude for factor in (1, 2, 5, 10) if factor * magnitude >= exact * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


def bounds(chart: Chart) -> tuple[float, float, float, float]:
    """The least and greatest x, and the least and greatest y with some room; 0 is in if it is not far."""
    xs = [x for series in chart.series for x, _ in series.points]
    ys = [y for series in chart.series for _, y in series.points]
    low, high = min(ys), max(ys)
    if 0 < low < 0.5 * high:
        low = 0.0
    room = 0.05 * (high - low) or 0.1 * abs(high) or 1.0
    left, right = min(xs), max(xs)
    return left, right if right > left else left + 1, low - (room if low else 0), high + room


def _figure(index: int, chart: Chart) -> str:
    names = "".join(
        f"<span><i style='background:{series.color}'></i>{escape(series.name)}</span>" for series in chart.series
    )
    return (
        f"<figure class='card'><figcaption>{escape(chart.title)}</figcaption><div class='legend'>{names}</div>"
        f"<svg viewBox='0 0 {WIDTH} {HEIGHT}' role='img' aria-label='{escape(chart.title)}' data-chart='{index}'>"
        f"{_axes(chart)}{''.join(_curve(series, bounds(chart)) for series in chart.series)}"
        f"<line class='cursor' y1='{TOP}' y2='{HEIGHT - BOTTOM}'/></svg></figure>"
    )


def _axes(chart: Chart) -> str:
    """Grid, ticks and the name of the x axis."""
    left, right, low, high = box = bounds(chart)
    parts = []
    for y in ticks(low, high):
        _, v = _place(left, y, box)
        parts.append(f"<line class='grid' x1='{LEFT}' x2='{WIDTH - RIGHT}' y1='{v:.1f}' y2='{v:.1f}'/>")
        parts.append(f"<text x='{LEFT - 6}' y='{v + 3.5:.1f}' text-anchor='end'>{y:.4g}</text>")
    for x in ticks(left, right):
        u, _ = _place(x, low, box)
        parts.append(f"<text x='{u:.1f}' y='{HEIGHT - BOTTOM + 14}' text-anchor='middle'>{_short(x)}</text>")
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f"<text x='{middle}' y='{HEIGHT - 4}' text-anchor='middle'>{escape(chart.x_label)}</text>")
    return "".join(parts)


def _curve(series: Series, box: tuple[float, float, float, float]) -> str:
    places = [_place(x, y, box) for x, y in series.points]
    line = " ".join(f"{u:.1f},{v:.1f}" for u, v in places)
    alone = series.marked or len(places) == 1
    dots = "".join(f"<circle cx='{u:.1f}' cy='{v:.1f}' r='3' fill='{series.color}'/>" for u, v in places if alone)
    return f"<polyline points='{line}' stroke='{series.color}'/>{dots}"


def _place(x: float, y: float, box: tuple[float, float, float, float]) -> tuple[float, float]:
    """Where a point is in the SVG, px."""
    left, right, low, high = box
    u = LEFT + (x - left) / (right - left) * (WIDTH - LEFT - RIGHT)
    return u, HEIGHT - BOTTOM - (y - low) / (high - low) * (HEIGHT - TOP - BOTTOM)


def _short(number: float) -> str:
    return f"{number / 1000:.4g}k" if abs(number) >= 10_000 else f"{number:.4g}"


def _chart_data(chart: Chart) -> dict:
    """What the page's script needs to name the points under the pointer."""
    left, right, *_ = bounds(chart)
    series = [{"name": s.name, "points": s.points} for s in chart.series]
    return {"x": chart.x_label, "range": [left, right], "pixels": [LEFT, WIDTH - RIGHT, WIDTH], "series": series}


# Timeline


def _timeline_data(timeline: Timeline) -> dict:
    """The lanes, a list per bar: row, start, end, then a kind and a text, or the fields of a trajectory."""
    return {
        "duration": timeline.duration,
        "fields": TRAJECTORY_FIELDS,
        "colors": STATE_COLORS,
        "lanes": [_lane_data(lane) for lane in timeline.lanes],
    }


def _lane_data(lane: Lane) -> dict:
    return {
        "name": lane.name,
        "named_rows": len(lane.row_names),
        "rows": lane.num_rows,
        "bars": [_bar_data(bar) for bar in lane.bars if bar.kind != "trajectory"],
        "trajectories": [_trajectory_data(bar) for bar in lane.bars if bar.kind == "trajectory"],
        "marks": [[round(m.time, 4), m.kind, describe(f"worker {m.kind}", m.details)] for m in lane.marks],
    }


def _bar_data(bar: Bar) -> list:
    return [bar.row, round(bar.start, 4), round(bar.end, 4), bar.kind, describe(bar_name(bar), bar.details)]


def _trajectory_data(bar: Bar) -> list:
    values = [bar.details.get(name) for name in TRAJECTORY_FIELDS]
    return [bar.row, round(bar.start, 4), round(bar.end, 4), *(values if values[-1] else values[:-1])]


def describe(name: str, details: dict) -> str:
    """A name and what is known of it, a line each."""
    values = {key: f"{value:.4g}" if isinstance(value, float) else value for key, value in details.items()}
    return "\n".join([name, *(f"{key.replace('_', ' ')}: {value}" for key, value in values.items())])
