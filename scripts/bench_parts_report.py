"""Records and table of bench_parts.py."""

import statistics
from dataclasses import dataclass
from pathlib import Path

from scripts.bench_rollout_report import load, made_by


@dataclass(frozen=True)
class Part:
    """A part of ours and what it is measured against."""

    name: str
    ours: str
    """What is ours, with its unit."""
    limit: str
    """What it is divided by, in the same unit; empty where there is nothing."""
    form: str
    """Format of both."""
    factor: float = 1.0
    """From the record's unit to the one shown."""
    target: float | None = None
    """Of the ratio ours ÷ limit, or of ours where there is no limit."""
    at_least: bool = True
    """Whether the ratio is to be at least the target, or at most."""
    lower_is_ours: bool = False
    """Whether the ratio is limit ÷ ours: a speed-up in seconds."""

    def ratio(self, ours: float, limit: float | None) -> float | None:
        """Of one measurement."""
        if limit is None:
            return None
        return limit / ours if self.lower_is_ours else ours / limit

    def is_reached(self, value: float) -> bool:
        """Whether a median meets the target."""
        return value >= self.target if self.at_least else value <= self.target


PHASES = ("pause", "start", "load", "finish", "version", "resume")
"""Of a weight update, as vLLM's engine is asked for them."""


def _speed_up(task: str, ratio: int) -> Part:
    return Part(
        f"speed-up {task} α={ratio}", f"s per step at α = {ratio}", "s per step at α = 0", ".3f", lower_is_ours=True
    )


PARTS = {
    part.name: part
    for part in (
        Part("rollout natural", "rollout worker, tokens/s", "plain AsyncLLM", ".0f", target=0.95),
        Part("rollout long", "rollout worker, tokens/s", "plain AsyncLLM", ".0f", target=0.95),
        Part("trainer natural", "train_step, tokens/s", "plain step", ".0f", target=0.9),
        Part("trainer long", "train_step, tokens/s", "plain step", ".0f", target=0.9),
        Part("publish tiny", "stage and transfer, GB/s", "memcpy", ".3f", 1e-9),
        Part("publish large", "stage and transfer, GB/s", "memcpy", ".3f", 1e-9),
        Part("stage large", "stage alone, GB/s", "memcpy", ".3f", 1e-9),
        *(Part(f"update: {phase}", "ms", "", ".2f", 1e3) for phase in PHASES),
        Part("pause α=1", "pause of generation per update, ms", "step", ".1f", 1e3, 0.01, at_least=False),
        Part("pause α=2", "pause of generation per update, ms", "step", ".1f", 1e3, 0.01, at_least=False),
        Part("queue 1 per message", "CPU time per trajectory in the trainer's process, µs", "", ".0f"),
        Part("queue 16 per message", "CPU time per trajectory in the trainer's process, µs", "", ".0f"),
        Part("overlap α=1", "s per step", "slower half alone", ".3f", target=1.10, at_least=False),
        Part("overlap α=2", "s per step", "slower half alone", ".3f", target=1.10, at_least=False),
        *(_speed_up(task, ratio) for task in ("natural", "frozen_lake") for ratio in (1, 2)),
    )
}


def record(name: str, repeat: int, ours: float, limit: float | None, **more) -> dict:
    """One measurement of a part; `more` are numbers beside it."""
    return {
        "part": name,
        "repeat": repeat,
        "ours": ours,
        "limit": limit,
        "ratio": PARTS[name].ratio(ours, limit),
        **more,
    }


def table(records: list[dict]) -> list[str]:
    """Markdown rows, one per part; medians with minimum and maximum."""
    lines = ["| part | ours | limit | ratio | target | reached |", "|---" * 6 + "|"]
    for name, part in PARTS.items():
        found = [r for r in records if r["part"] == name]
        if found:
            lines.append(f"| {' | '.join([name, *_cells(part, found)])} |")
    return lines


def _cells(part: Part, found: list[dict]) -> list[str]:
    ours = f"{part.ours}: {spread([r['ours'] * part.factor for r in found], part.form)}, n = {len(found)}"
    if not part.limit:
        return [ours, "–", "–", "–", "–"]
    limit = f"{part.limit}: {spread([r['limit'] * part.factor for r in found], part.form)}"
    ratios = [r["ratio"] for r in found]
    if part.target is None:
        return [ours, limit, spread(ratios, ".3f"), "–", "–"]
    reached = "yes" if part.is_reached(statistics.median(ratios)) else "no"
    return [ours, limit, spread(ratios, ".3f"), f"{'≥' if part.at_least else '≤'} {part.target:g}", reached]


def summary(records: list[dict]) -> list[str]:
    """Markdown rows of the parts that have a limit: ratio and target."""
    lines = ["| part | ours ÷ limit | target | reached |", "|---" * 4 + "|"]
    for name, part in PARTS.items():
        found = [r for r in records if r["part"] == name]
        if found and part.limit:
            _, _, *cells = _cells(part, found)
            lines.append(f"| {name}: {part.ours.split(',')[0]}, against {part.limit} | {' | '.join(cells)} |")
    return lines


def spread(values: list[float], form: str) -> str:
    """Median [minimum–maximum]."""
    return f"{statistics.median(values):{form}} [{min(values):{form}}–{max(values):{form}}]"


def cpu_lines(records: list[dict]) -> list[str]:
    """Where the CPU time of a whole step goes, for each part that recorded it."""
    lines = []
    for name in dict.fromkeys(r["part"] for r in records if "cpu_s" in r):
        found = [r for r in records if r["part"] == name]
        used = {who: statistics.median(r["cpu_s"][who] for r in found) * 1e3 for who in found[0]["cpu_s"]}
        shares = ", ".join(f"{who} {ms:.0f}" for who, ms in used.items())
        lines.append(f"CPU time per step, ms, {name}: {shares}; sum {sum(used.values()):.0f}")
    return lines


def write(out: Path) -> None:
    """Write table.md from parts.jsonl in the folder `out`. Raises ValueError if it has no records."""
    records = load(out / "parts.jsonl")
    text = [
        "# The parts against their limits",
        "\n".join(made_by(records)),
        "What is measured, and how, is on top of `scripts/bench_parts.py`. Numbers are medians [minimum–maximum]; "
        "ratios are of measurements that were made one after the other.",
        "\n".join(table(records)),
        "\n\n".join(cpu_lines(records)),
    ]
    (out / "table.md").write_text("\n\n".join(filter(None, text)) + "\n", encoding="utf-8")
