"""Records, table and figure of simulate.py; its option --report draws the last two again."""

import dataclasses
import json
from pathlib import Path

from scripts.simulation import engine, scenarios, workload
from scripts.simulation.cluster import FLOPS_PER_PARAMETER, Outcome
from scripts.simulation.scenarios import Outcomes, Scenario
from scripts.simulation.theory import check

NUMBERS = (
    "step_s", "rollout_s", "train_s", "trained_tokens_per_s", "slot_share",
    "controller_share", "generated_tokens", "resumed_tokens", "tokens", "num_trajectories", "staleness_mean",
    "staleness_max",
)  # fmt: skip


def record(scenario: Scenario, outcomes: Outcomes, tail: float, cpu_s: float) -> dict:
    """One line of the file of records."""
    arms = {arm: _arm(scenario, outcomes, arm) for arm in scenario.arms}
    return {
        "scenario": scenario.name,
        "longest_to_median": tail,
        "measure": scenario.unit,
        "paper": scenario.paper_text,
        "certainty": scenario.certainty,
        "why": scenario.why,
        "derived": scenario.derived(outcomes) if scenario.derived else "",
        "cpu_s": round(cpu_s, 1),
        "arms": arms,
    }


def _arm(scenario: Scenario, outcomes: Outcomes, arm: str) -> dict:
    outcome = outcomes[arm]
    case = outcome.case
    return {
        "value": getattr(outcome, scenario.measure),
        "gain": scenario.gain(outcomes, arm),
        "paper_gain": scenario.paper.get(arm),
        "spread": _spread(outcome) if scenario.measure == "rollout_s" else None,
        "options": case.options,
        "num_workers": case.cluster.num_workers,
        "engine": case.cluster.curve.source,
        "num_slots": case.cluster.num_slots,
        "steps": case.steps,
        **{name: getattr(outcome, name) for name in NUMBERS},
        "ledger": outcome.ledger,
        "propositions": _propositions(outcome),
    }


def _spread(outcome: Outcome) -> tuple[float, float]:
    waits = [step.wait_s for step in outcome.steps]
    return min(waits), max(waits)


def _propositions(outcome: Outcome) -> list[dict]:
    """Each proposition once: of several steps the one that comes nearest to its bound."""
    worst: dict[str, dict] = {}
    for bound in check(outcome):
        found = {**dataclasses.asdict(bound), "holds": bound.holds}
        known = worst.get(bound.proposition)
        if known is None or found["measured_s"] * known["bound_s"] > known["measured_s"] * found["bound_s"]:
            worst[bound.proposition] = found
    return list(worst.values())


def load(path: Path) -> list[dict]:
    """The records. Raises ValueError if there are none."""
    found = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    if not found:
        raise ValueError(f"{path} has no records; run python scripts/simulate.py first")
    return found


def _key(found: dict) -> tuple[str, float]:
    return found["scenario"], found["longest_to_median"]


def replace(new: dict, path: Path) -> None:
    """Append a record, in the place of an earlier one of the same scenario."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    kept = [json.loads(line) for line in lines]
    places = [index for index, old in enumerate(kept) if _key(old) == _key(new)]
    if places:
        kept[places[0]] = new
    else:
        kept.append(new)
    path.write_text("".join(json.dumps(one, ensure_ascii=False) + "\n" for one in kept), encoding="utf-8")


# The table


def table(records: list[dict]) -> list[str]:
    """Markdown rows: one per scenario, the arms one after the other."""
    lines = [
        "| comparison | arms | paper | how sure | paper: times better | ours: times better | ours / paper | ours with "
        "longest/median 10; 5 | ours | further | where they differ |",
        "|---" * 11 + "|",
    ]
    main = [r for r in records if r["longest_to_median"] == workload.LONGEST_TO_MEDIAN]
    return lines + [_row(found, records) for found in main]


def _row(found: dict, records: list[dict]) -> str:
    arms = found["arms"]
    last = list(arms.values())[1:]
    paper = [f"{arm['paper_gain']:.2f}" if arm["paper_gain"] else "–" for arm in last]
    ratios = [f"{arm['gain'] / arm['paper_gain']:.2f}" if arm["paper_gain"] else "–" for arm in last]
    others = {r["longest_to_median"]: r for r in records if r["scenario"] == found["scenario"]}
    tails = [
        " → ".join(f"{arm['gain']:.2f}" for arm in list(others[tail]["arms"].values())[1:])
        for tail in scenarios.TAILS[1:]
        if tail in others
    ]
    cells = [
        found["scenario"],
        " → ".join(arms),
        found["paper"],
        found["certainty"],
        " → ".join(paper) if any(arm["paper_gain"] for arm in last) else "–",
        " → ".join(f"{arm['gain']:.2f}" for arm in last),
        " → ".join(ratios) if any(arm["paper_gain"] for arm in last) else "–",
        "; ".join(tails) or "–",
        f"{found['measure']}: {' → '.join(_number(arm['value']) for arm in arms.values())}; steps: "
        f"{min(arm['steps'] for arm in arms.values())}",
        found["derived"] or "–",
        found["why"],
    ]
    return f"| {' | '.join(cells)} |"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def propositions(records: list[dict]) -> list[str]:
    """How many runs each proposition speaks of, how near they come to it, and why others are left out."""
    lines = ["| proposition | runs | measured / bound: mean, worst | fails | left out, and why |", "|---" * 5 + "|"]
    found = [p for r in records for arm in r["arms"].values() for p in arm["propositions"]]
    for name in sorted({p["proposition"] for p in found}):
        ours = [p for p in found if p["proposition"] == name]
        met = [p["measured_s"] / p["bound_s"] for p in ours if not p["unmet"]]
        fails = sum(not p["holds"] for p in ours if not p["unmet"])
        reasons: dict[str, int] = {}
        for p in ours:
            if p["unmet"]:
                reason = p["unmet"].split(":")[0]
                reasons[reason] = reasons.get(reason, 0) + 1
        why = "; ".join(f"{count}: {reason}" for reason, count in reasons.items()) or "–"
        near = f"{sum(met) / len(met):.2f}, {max(met):.2f}" if met else "–"
        lines.append(f"| {name} | {len(met)} | {near} | {fails} | {why} |")
    return lines


def assumptions() -> str:
    """What the papers do not give."""
    return ASSUMED.format(
        tail=workload.LONGEST_TO_MEDIAN,
        batch=workload.RESPONSES_OF_LONGEST,
        overhead=engine.STEP_OVERHEAD_S * 1000,
        flops=engine.FLOPS_EFFICIENCY,
        bandwidth=engine.BANDWIDTH_EFFICIENCY,
        slots=engine.MAX_RUNNING_REQUESTS,
        training=FLOPS_PER_PARAMETER,
        sync=scenarios.SYNC_BYTES_PER_S / 1e9,
        prompt=workload.PROMPT_TOKENS,
        varying=workload.VARYING_SHARE,
        turns=scenarios.NUM_TURNS,
        turn=scenarios.TURN_TOKENS,
    )


ASSUMED = """\
- Lengths: lognormal, cut at the limit, which is {tail:g} times the median (ROLL Flash says more than 20 times) and is
  reached once in {batch} responses; a third of the variance of log-lengths lies within a group (APRIL: less than across
  groups). One column has the same cases with lighter tails.
- Engine, where no file is given: a roofline. A decoding step takes {overhead:g} ms + max(2·P·n / ({flops:g}·FLOP/s),
  (2·P + n·context·KV bytes) / ({bandwidth:g}·bandwidth)) for n requests and P parameters; at most {slots} requests per
  engine (ROLL's default), or as many as fit. Data sheets: H800 989 TFLOP/s, 3.35 TB/s, 80 GB; MI300X 1307 TFLOP/s,
  5.3 TB/s, 192 GB. Models are as in their configurations.
- Training: {training}·P floating-point operations per token at {flops:.0%} of the data sheet, divided perfectly.
- Weights: {sync:g} GB/s to all engines at once; trainer and engines stand still meanwhile.
- Where the paper names neither model, GPU nor limit: Qwen3-8B, H800, 8192 tokens. Prompts of {prompt} tokens;
  {varying:.0%} of the groups teach something; environments take {turns} turns of {turn} tokens.
- Nothing is fitted to a row: all ratios are predictions. Absolute times depend on these numbers directly."""


def made_by(records: list[dict]) -> list[str]:
    """What made the records, a line for each command and commit."""
    lines = {}
    for r in records:
        lines[f"`{r['command']}`: commit {r['commit']}{', with changes' * r['dirty']}; {r['hardware']}."] = None
    return list(lines)


def write(out: Path) -> None:
    """Write table.md and simulation.png from simulation.jsonl in the folder `out`. Raises ValueError if it is empty."""
    records = load(out / "simulation.jsonl")
    draw(records, out / "simulation.png")
    cpu_s = sum(r["cpu_s"] for r in records)
    text = [
        "# The papers' comparisons, simulated at their scale",
        "\n".join(made_by(records)),
        f"All records together: {cpu_s:.0f} s of CPU time on one core. What is real and what is simulated is on top of "
        "`scripts/simulate.py`. Ratios are to the first arm, of `scaling` to the naive arm of as many GPUs; above 1 is "
        "better.",
        "## Assumed, once and for all rows",
        assumptions(),
        "## Comparisons",
        "\n".join(table(records)),
        "![times better than the first arm, ours and the papers'](simulation.png)",
        "## Propositions 1 and 2 of ROLL Flash",
        "What they state, and what of a run is compared with what, is on top of `scripts/simulation/theory.py`.",
        "\n".join(propositions(records)),
    ]
    (out / "table.md").write_text("\n\n".join(text) + "\n", encoding="utf-8")


def draw(records: list[dict], out: Path) -> None:
    """Write the figure: a panel per comparison; bars are ours, dots the paper's."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = [r for r in records if r["longest_to_median"] == workload.LONGEST_TO_MEDIAN]
    columns = min(4, len(shown))
    figure = Figure(figsize=(5 * columns, 2.6 * -(-len(shown) // columns)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(-(-len(shown) // columns), columns, squeeze=False).flatten()
    for panel, found in zip(panels, shown, strict=False):
        arms = list(found["arms"].items())
        panel.barh(range(len(arms)), [arm["gain"] for _, arm in arms], color="C0", alpha=0.6, label="ours")
        theirs = [(place, arm["paper_gain"]) for place, (_, arm) in enumerate(arms) if arm["paper_gain"]]
        panel.plot([gain for _, gain in theirs], [place for place, _ in theirs], "ko", label="paper")
        panel.axvline(1, color="k", linewidth=0.8)
        panel.set_yticks(range(len(arms)), [name for name, _ in arms], fontsize=7)
        panel.invert_yaxis()
        panel.set_title(found["scenario"], fontsize=8)
        panel.grid(axis="x", alpha=0.3)
    for panel in panels[len(shown) :]:
        panel.set_axis_off()
    figure.savefig(out, dpi=100)
