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
        tuple(record[key] for key in ("scenario", "tail", "seed")): record
        for record in [*read(path), new]
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in kept.values()),
        encoding="utf-8",
    )


# What the seeds say


def known(records: list[dict]) -> dict[tuple[str, float], Scenario]:
    """The scenarios of which there are records, by name and tail. Raises ValueError if one is not as in the file."""
    in_file = {(scenario.name, scenario.tail): scenario for scenario in scenarios.scenarios()}
    recorded = {(record["scenario"], record["tail"]): set(record["arms"]) for record in records}
    if stale := [
        key
        for key, arms in recorded.items()
        if key not in in_file or arms != set(in_file[key].arms)
    ]:
        raise ValueError(
            f"records of {stale[0][0]!r} do not have the arms of scenarios.toml; take them out, or run it"
        )
    return {key: scenario for key, scenario in in_file.items() if key in recorded}


def claims(records: list[dict]) -> pd.DataFrame:
    """A line for each number of a comparison at each tail: mean, min and max of the seeds, and the paper's."""
    compared, values = known(records), []
    for record in records:
        scenario = compared[record["scenario"], record["tail"]]
        for place, claim in enumerate(scenario.claims):
            measured = (
                record["arms"][claim.arm][scenario.measure] if claim.against else float("nan")
            )
            values.append((scenario.name, scenario.tail, place, claim.of(record["arms"]), measured))
    columns = ["scenario", "tail", "place", "value", "measured"]
    groups = pd.DataFrame(values, columns=columns).groupby(columns[:3], sort=False)
    numbers = (
        groups.value.agg(["mean", "min", "max", "count"])
        .assign(measured=groups.measured.mean())
        .reset_index()
    )
    claims_of_rows = [
        compared[row.scenario, row.tail].claims[row.place] for row in numbers.itertuples()
    ]
    for field in ("name", "against", "paper", "short"):
        numbers[field] = [getattr(claim, field) for claim in claims_of_rows]
    numbers["verdict"] = [
        verdict(row.paper, row.mean, row.min, row.max) for row in numbers.itertuples()
    ]
    return numbers


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


def num_seeds(numbers: pd.DataFrame) -> str:
    """How many seeds each number has."""
    return f"n = {_range((numbers['count'].min(), numbers['count'].max()))} seeds"


def short(records: list[dict]) -> list[str]:
    """Lines of a table of at most 10 rows, one of each mechanism, and of how many numbers are hit and missed."""
    numbers = claims(records)
    numbers = numbers[numbers["tail"] == workload.LONGEST_TO_MEDIAN]
    shown = numbers[numbers.short != ""]
    rows = [
        [r.short, _range(r.paper), _number(r.mean), _range((r.min, r.max)), r.verdict]
        for r in shown.itertuples()
    ]
    is_own = numbers.scenario.str.startswith("own bench")
    papers, own = (
        numbers[is_chosen].verdict.value_counts().reindex(["hit", "MISS"], fill_value=0)
        for is_chosen in (~is_own, is_own)
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
    numbers, compared, texts = claims(records), known(records), list(_texts(records))
    other_tails = sorted(
        {tail for tail in numbers["tail"] if tail != workload.LONGEST_TO_MEDIAN}, reverse=True
    )
    means = numbers.set_index(["scenario", "name", "tail"])["mean"].to_dict()
    rows = []
    for r in numbers[numbers["tail"] == workload.LONGEST_TO_MEDIAN].itertuples():
        scenario = compared[r.scenario, r.tail]
        note = texts.index((scenario.source, scenario.why)) + 1
        paper = [_range(r.paper), _number(r.mean), _range((r.min, r.max)), r.verdict, str(note)]
        tails = [_number(means.get((r.scenario, r.name, tail))) for tail in other_tails]
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
    tails = [f"mean at longest/median {tail:g}" for tail in other_tails]
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
                f"{_number(column.mean())} ({_range((column.min(), column.max()))})"
                for _, column in runs_of_swarm[list(OF_SWARMS)].items()
            ),
        ]
        for name, runs_of_swarm in runs.groupby("swarm", sort=False)
    ]
    return markdown(["swarm", *OF_SWARMS], rows)


def notes(records: list[dict]) -> list[str]:
    """Lines of a list: what the papers say of each comparison, how sure that is, and where ours differs."""
    texts = enumerate(_texts(records).items(), start=1)
    return [
        f"{i}. **{'; '.join(names)}.** {source}. Where ours differs: {why}."
        for i, ((source, why), names) in texts
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
        **{
            module.__name__.rpartition(".")[2]: module
            for module in (cluster, engine, scenarios, workload)
        },
    )
    (out / "table.md").write_text(text + "\n", encoding="utf-8")
