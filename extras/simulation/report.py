"""Records and tables of scripts/simulate.py; its option --report writes the tables again."""

import json
from pathlib import Path

import pandas as pd
from jinja2 import StrictUndefined, Template

from extras.simulation import cluster, engine, scenarios, workload
from extras.simulation.scenarios import UNITS, Scenario

NEAR = 0.15
RULE = f"A hit: what is reported lies within the range of the seeds, or within {NEAR:.0%} of their mean."


def read(path: Path) -> list[dict]:
    """Return the records of a file, one a line; none if there is no file."""
    return (
        [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        if path.exists()
        else []
    )


def markdown(heading: list[str], rows: list[list]) -> list[str]:
    """Return the lines of a table."""
    return [
        f"| {' | '.join(map(str, cells))} |" for cells in (heading, ["---"] * len(heading), *rows)
    ]


def replace(new: dict, path: Path) -> None:
    """Append a record, in the place of an earlier one of the same scenario and seed."""
    kept = {
        tuple(one[key] for key in ("scenario", "tail", "seed")): one for one in [*read(path), new]
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in kept.values()),
        encoding="utf-8",
    )


# What the seeds say


def known(records: list[dict]) -> dict[tuple[str, float], Scenario]:
    """The scenarios of which there are records, by name and tail. Raises ValueError if one is not as in the file."""
    there = {(scenario.name, scenario.tail): scenario for scenario in scenarios.scenarios()}
    recorded = {(record["scenario"], record["tail"]): set(record["arms"]) for record in records}
    if stale := [
        key for key, arms in recorded.items() if key not in there or arms != set(there[key].arms)
    ]:
        raise ValueError(
            f"records of {stale[0][0]!r} do not have the arms of scenarios.toml; take them out, or run it"
        )
    return {key: scenario for key, scenario in there.items() if key in recorded}


def claims(records: list[dict]) -> pd.DataFrame:
    """A line for each number of a comparison at each tail: mean, min and max of the seeds, and the paper's."""
    there, values = known(records), []
    for record in records:
        scenario = there[record["scenario"], record["tail"]]
        for place, claim in enumerate(scenario.claims):
            measured = (
                record["arms"][claim.arm][scenario.measure] if claim.against else float("nan")
            )
            values.append((scenario.name, scenario.tail, place, claim.of(record["arms"]), measured))
    columns = ["scenario", "tail", "place", "value", "measured"]
    groups = pd.DataFrame(values, columns=columns).groupby(columns[:3], sort=False)
    found = (
        groups.value.agg(["mean", "min", "max", "count"])
        .assign(measured=groups.measured.mean())
        .reset_index()
    )
    of = [there[row.scenario, row.tail].claims[row.place] for row in found.itertuples()]
    for field in ("name", "against", "paper", "short"):
        found[field] = [getattr(claim, field) for claim in of]
    found["verdict"] = [
        verdict(row.paper, row.mean, row.min, row.max) for row in found.itertuples()
    ]
    return found


def verdict(paper: tuple[float, float] | None, mean: float, lowest: float, highest: float) -> str:
    """Whether the seeds hit what the paper reports; see RULE."""
    if paper is None:
        return "–"
    is_near = abs(min(max(mean, paper[0]), paper[1]) - mean) <= NEAR * mean
    return "hit" if is_near or (paper[0] <= highest and lowest <= paper[1]) else "MISS"


# Markdown


def _number(value: float | None) -> str:
    if pd.isna(value):
        return "–"
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:#.3g}"


def _range(ends: tuple[float, float] | None) -> str:
    return "–".join(dict.fromkeys(map(_number, ends))) if isinstance(ends, tuple) else "–"


def num_seeds(found: pd.DataFrame) -> str:
    """How many seeds each number has."""
    return f"n = {_range((found['count'].min(), found['count'].max()))} seeds"


def short(records: list[dict]) -> list[str]:
    """Lines of a table of at most 10 rows, one of each mechanism, and of how many numbers are hit and missed."""
    found = claims(records)
    found = found[found["tail"] == workload.LONGEST_TO_MEDIAN]
    shown = found[found.short != ""]
    rows = [
        [r.short, _range(r.paper), _number(r.mean), _range((r.min, r.max)), r.verdict]
        for r in shown.itertuples()
    ]
    is_own = found.scenario.str.startswith("own bench")
    papers, own = (
        found[of].verdict.value_counts().reindex(["hit", "MISS"], fill_value=0)
        for of in (~is_own, is_own)
    )
    return [
        *markdown(
            ["comparison", "paper", "simulated, mean", f"range, {num_seeds(shown)}", ""], rows
        ),
        "",
        f"{RULE} Of {papers.sum()} numbers of papers {papers['hit']} are hit; of "
        f"{own.sum()} that our own bench measured, {own['hit']}.",
    ]


def table(records: list[dict]) -> list[str]:
    """Lines of the whole table: a row for each number."""
    found, there, texts = claims(records), known(records), list(_texts(records))
    others = sorted(
        {tail for tail in found["tail"] if tail != workload.LONGEST_TO_MEDIAN}, reverse=True
    )
    means = found.set_index(["scenario", "name", "tail"])["mean"].to_dict()
    rows = []
    for r in found[found["tail"] == workload.LONGEST_TO_MEDIAN].itertuples():
        scenario = there[r.scenario, r.tail]
        note = texts.index((scenario.source, scenario.why)) + 1
        paper = [_range(r.paper), _number(r.mean), _range((r.min, r.max)), r.verdict, str(note)]
        tails = [_number(means.get((r.scenario, r.name, tail))) for tail in others]
        what = [f"{r.scenario}, {UNITS[scenario.measure]}", r.name, r.against or "–"]
        rows.append([*what, *paper, *tails, _number(r.measured)])
    heads = [
        "comparison, measure",
        "number or arm",
        "times better than",
        "reported",
        "mean",
        "range",
        "",
        "note",
    ]
    tails = [f"mean at longest/median {tail:g}" for tail in others]
    return markdown([*heads, *tails, "the measure itself, mean"], rows)


OF_SWARMS = (
    "trained_tokens_per_s", "slot_share", "staleness_mean", "staleness_max", "uplink_share", "fetch_s",
    "cpu_ms_per_trajectory", "issued_again", "tokens_per_response", "step_s", "step_by_rates_s", "step_by_echo_s",
    "machines_by_echo",
)  # fmt: skip
"""Numbers of a swarm that its table has; see `Simulation._of_swarm`."""


def swarms(records: list[dict]) -> list[str]:
    """Lines of a table: what each simulated swarm did, with mean and range of the seeds."""
    arms = [
        (f"{r['scenario']} {name}", arm)
        for r in records
        for name, arm in r["arms"].items()
        if "fetch_s" in arm
    ]
    runs = pd.DataFrame(
        [{"swarm": name, **arm} for name, arm in arms], columns=["swarm", *OF_SWARMS]
    )
    rows = [
        [
            name,
            *(
                f"{_number(of.mean())} ({_range((of.min(), of.max()))})"
                for _, of in found[list(OF_SWARMS)].items()
            ),
        ]
        for name, found in runs.groupby("swarm", sort=False)
    ]
    return markdown(["swarm", *OF_SWARMS], rows)


def notes(records: list[dict]) -> list[str]:
    """Lines of a list: what the papers say of each comparison, how sure that is, and where ours differs."""
    found = enumerate(_texts(records).items(), start=1)
    return [
        f"{i}. **{'; '.join(of)}.** {source}. Where ours differs: {why}."
        for i, ((source, why), of) in found
    ]


def _texts(records: list[dict]) -> dict[tuple[str, str], list[str]]:
    """Source and reason -> names of the comparisons that they are for."""
    names: dict[tuple[str, str], list[str]] = {}
    for (name, tail), scenario in known(records).items():
        if tail == workload.LONGEST_TO_MEDIAN:
            names.setdefault((scenario.source, scenario.why), []).append(name)
    return names


def write(out: Path) -> None:
    """Write table.md, which is page.md with numbers, from simulation.jsonl in the folder `out`.

    Raises ValueError if that is empty.
    """
    records = read(out / "simulation.jsonl")
    if not records:
        raise ValueError(
            f"{out / 'simulation.jsonl'} has no records; run python scripts/simulate.py first"
        )
    page = Template(
        Path(__file__).with_name("page.md").read_text(encoding="utf-8"), undefined=StrictUndefined
    )
    text = page.render(
        made_by=dict.fromkeys(
            f"`{r['command']}`: commit {r['commit']}{', with changes' * r['dirty']}; {r['hardware']}."
            for r in records
        ),
        num_seeds=num_seeds(claims(records)),
        minutes=sum(r["cpu_s"] for r in records) / 60,
        rule=RULE,
        **{part.__name__: part(records) for part in (short, table, notes, swarms)},
        **{of.__name__.rpartition(".")[2]: of for of in (cluster, engine, scenarios, workload)},
    )
    (out / "table.md").write_text(text + "\n", encoding="utf-8")
