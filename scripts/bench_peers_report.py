"""Records and tables of bench_peers.py."""

import json
import statistics
from pathlib import Path

from scripts.bench_parts_report import spread
from scripts.bench_rollout_report import load, made_by

WANTED_ACCURACY = 0.8
COLUMNS = {
    "samples_per_s": ("samples/s", ".0f"),
    "tokens_per_s": ("tokens/s", ".0f"),
    "tokens_per_sample": ("tokens per sample", ".1f"),
    "cpu_ms_per_sample": ("CPU ms per sample", ".1f"),
    "cores_busy": ("cores busy", ".2f"),
    "to_accuracy_s": (f"s to held-out {WANTED_ACCURACY:g}", ".0f"),
    "start_s": ("s to the end of step 1", ".0f"),
    "peak_memory_gb": ("peak memory, GB", ".1f"),
}
"""Key of the record, heading, format."""
TARGETS = {"natural": 2.0, "short": 1.0, "long": 2.0}
"""Samples/s of our best arm, in multiples of the best arm of TRL."""
HALVES = ("generation alone", "training alone")


def seconds_to(curve: list[tuple[int, float, float]], wanted: float = WANTED_ACCURACY) -> float | None:
    """Seconds to the first weights whose accuracy is at least `wanted`, or None if none has it."""
    return next((seconds for _, seconds, accuracy in curve if accuracy >= wanted), None)


def forget(arm: str, work: str, path: Path) -> None:
    """Take earlier runs of an arm on a work out of the file of records."""
    if path.exists():
        kept = [r for r in map(json.loads, path.read_text(encoding="utf-8").splitlines()) if _key(r) != (arm, work)]
        path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in kept), encoding="utf-8")


def _key(record: dict) -> tuple[str, str]:
    return record["arm"], record["work"]


def by_arm(records: list[dict], work: str) -> dict[str, list[dict]]:
    """Records of each arm on a work."""
    arms: dict[str, list[dict]] = {}
    for record in records:
        if record["work"] == work:
            arms.setdefault(record["arm"], []).append(record)
    return arms


def table(arms: dict[str, list[dict]], work: str) -> list[str]:
    """Markdown rows, one per arm: medians with minimum and maximum."""
    lines = [
        f"| {work} | n | {' | '.join(heading for heading, _ in COLUMNS.values())} |",
        "|---" * (len(COLUMNS) + 2) + "|",
    ]
    for name, found in arms.items():
        cells = [_cell(key, [r.get(key) for r in found], form) for key, (_, form) in COLUMNS.items()]
        lines.append(f"| {' | '.join([name, str(len(found)), *cells])} |")
    return lines


def _cell(key: str, values: list[float | None], form: str) -> str:
    """Of runs that never got to the accuracy there is no median; of others a number may not have been taken."""
    known = [value for value in values if value is not None]
    if not known:
        return "–"
    if len(known) == len(values):
        return spread(known, form)
    return (
        f"{len(known)} of {len(values)} runs" if key == "to_accuracy_s" else f"{spread(known, form)}, n = {len(known)}"
    )


def rate(found: list[dict]) -> float:
    """Median samples per second."""
    return statistics.median(r["samples_per_s"] for r in found)


def best(arms: dict[str, list[dict]], prefix: str) -> str | None:
    """The fastest arm whose name begins so."""
    return max((name for name in arms if name.startswith(prefix)), key=lambda name: rate(arms[name]), default=None)


def comparison(arms: dict[str, list[dict]], work: str) -> list[str]:
    """What our best arm is to TRL's best, and both to the machine's limit."""
    ours, peer = best(arms, "ours"), best(arms, "TRL")
    lines = []
    if ours and peer:
        ratio = rate(arms[ours]) / rate(arms[peer])
        reached = "reached" if ratio >= TARGETS[work] else "missed"
        lines.append(f"{ours} ÷ {peer}: {ratio:.2f}× samples/s (target {TARGETS[work]:g}×: {reached}).")
    for name in filter(None, (ours, peer)):
        if (most := limit(arms[name])) is not None:
            share = f"of which it has {rate(arms[name]) / most:.0%}"
            lines.append(f"Limit of the machine at the CPU time of {name}: {most:.0f} samples/s, {share}.")
    if all(half in arms for half in HALVES):
        generate, learn = (rate(arms[half]) for half in HALVES)
        lines.append(f"Generation alone: {generate:.0f} samples/s; training alone: {learn:.0f}.")
    return lines


def limit(found: list[dict]) -> float | None:
    """Samples/s of an arm if it kept all cores busy with what a sample costs it; None if that was not measured."""
    most = [1e3 * r["cores"] / r["cpu_ms_per_sample"] for r in found if r.get("cpu_ms_per_sample")]
    return statistics.median(most) if most else None


def summary(records: list[dict]) -> list[str]:
    """Markdown rows, one per work: our best arm and TRL's, and what both are of the machine's limit."""
    lines = [
        "| work | ours, samples/s | TRL, samples/s | ours ÷ TRL | target | limits of the machine for both "
        f"| s to held-out {WANTED_ACCURACY:g}, ours | TRL |",
        "|---" * 8 + "|",
    ]
    for work in dict.fromkeys(record["work"] for record in records):
        arms = by_arm(records, work)
        ours, peer = best(arms, "ours"), best(arms, "TRL")
        cells = [
            work,
            *(f"{rate(arms[name]):.0f} ({name.removeprefix('TRL ').removeprefix('ours ')})" for name in (ours, peer)),
            f"{rate(arms[ours]) / rate(arms[peer]):.2f}",
            f"≥ {TARGETS[work]:g}",
            " and ".join(f"{limit(arms[name]) or 0:.0f}" for name in (ours, peer)),
            *(_soonest(arms, who) for who in ("ours", "TRL")),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _soonest(arms: dict[str, list[dict]], prefix: str) -> str:
    """The least median of seconds to the wanted accuracy, of the arms all of whose runs got there."""
    of_arms = {name: [r.get("to_accuracy_s") for r in arms[name]] for name in arms if name.startswith(prefix)}
    medians = {name: statistics.median(seconds) for name, seconds in of_arms.items() if None not in seconds}
    if not medians:
        return "–"
    name = min(medians, key=medians.get)
    return f"{medians[name]:.0f} ({name.removeprefix('TRL ').removeprefix('ours ')})"


def write(out: Path) -> None:
    """Write table.md from peers.jsonl in the folder `out`. Raises ValueError if it has no records."""
    records = load(out / "peers.jsonl")
    text = [
        "# Ours and TRL on the same work",
        "\n".join(made_by(records)),
        "What is measured, how, and with which settings is on top of `scripts/bench_peers.py`. Numbers are medians "
        "[minimum–maximum] of whole runs.",
    ]
    for work in dict.fromkeys(record["work"] for record in records):
        arms = by_arm(records, work)
        text += [f"## {work}", "\n".join(table(arms, work)), " ".join(comparison(arms, work))]
    (out / "table.md").write_text("\n\n".join(part for part in text if part) + "\n", encoding="utf-8")
