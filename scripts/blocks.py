"""Blocks of README.md and docs/ that are made and not written: `.venv/bin/cog -r README.md docs/*.md` puts them in.

Each function returns the Markdown of one block, from the records in results/ or from the code. So a page cannot say
another number than the records: tests/test_docs.py makes all blocks again and compares.
"""

import inspect
import itertools
import re
import statistics
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import pandas as pd

from algos import LOSSES
from algos.inputs import keywords_of
from asyncrl.config import OPTIONS, allowed_values
from scripts.bench import gpu as gpu_bench
from scripts.grids import measures_of, read_records
from scripts.lines import ROOT, markdown, read
from scripts.runs import MISSING
from scripts.stability import collapse_step

RESULTS = ROOT / "results"


def records_of(name: str) -> list[dict]:
    """Return the records of results/NAME/NAME.jsonl."""
    return read(RESULTS / name / f"{name}.jsonl")


def lines(texts: Iterable[str]) -> str:
    """Return lines as a block."""
    return "".join(f"{text}\n" for text in texts)


def table(heading: str, rows: Iterable[Sequence[object]]) -> str:
    """Return a table as a block. The headings are separated as in Markdown."""
    return lines(markdown(heading.split(" | "), rows))


# From the code and the records


def devices() -> str:
    """Return one line that lists the runs of each GPU."""
    gpus = {}
    for record in records_of("gpu"):
        if "numbers" in record:
            gpus.setdefault(record["gpu"], {})[record["case"].removesuffix(" -")] = record
    of_gpus = "; ".join(f"{gpu}: {', '.join(cases)}" for gpu, cases in gpus.items())
    return f"**What has run on which GPU.** {of_gpus or 'Nothing so far'}.\n"


def lags_of_smollm2() -> str:
    """Return level, final accuracies and collapses of each loss on SmolLM2, at lag 0, 4 and 16."""
    parts = {"study/smollm2": "", "tis_grpo": ", later seeds"}
    rows = {}
    for folder, note in parts.items():
        runs = measures_of(read_records(RESULTS / folder / "cells.jsonl"))
        lags = [record["cell"]["publish_delay"] for record in runs["record"]]
        for (loss, lag), group in runs.groupby(["loss", lags], sort=False):
            name = "fresh data" if lag == 0 else f"`{loss}`{note}"
            rows.setdefault(name, {})[lag] = _outcome(group)
    fresh = rows.pop("fresh data")[0]
    shown = [["fresh data", *fresh, *fresh]]
    for name, outcomes in rows.items():
        shown.append([name, *outcomes.get(4, [MISSING] * 3), *outcomes.get(16, [MISSING] * 3)])
    heading = "reward | final accuracy, each seed | collapsed"
    return table(f"loss | lag 4: {heading} | lag 16: {heading}", shown)


def _outcome(runs: pd.DataFrame) -> list[str]:
    """Return the mean level of runs of one loss and lag, their final accuracies, and how many collapsed."""
    collapses = [collapse_step(np.array(record["series"]["reward"])) for record in runs["record"]]
    num_collapsed = sum(step is not None for step in collapses)
    finals = " ".join(f"{final:.2f}" for final in runs["final"])
    return [f"{runs['level'].mean():.2f}", finals, f"{num_collapsed} of {len(runs)}"]


def speed_of_defaults() -> str:
    """Return our default options against TRL's fastest mode, by workload and hardware, in pairs by seed.

    If lengths are forced, responses are counted. The two systems count the tokens of a response differently.
    """
    pairs: dict[tuple[str, str], dict[int, dict[bool, dict]]] = {}
    for record in read(RESULTS / "peers" / "defaults.jsonl"):
        of_seeds = pairs.setdefault((record["work"], record["hardware"]), {})
        of_seeds.setdefault(record["seed"], {})[record["arm"].startswith("ours")] = record
    rows = []
    for (work, hardware), of_seeds in pairs.items():
        is_forced = work in ("long", "short")
        unit, rate = ("responses", "samples_per_s") if is_forced else ("tokens", "tokens_per_s")
        speeds = [(pair[True][rate], pair[False][rate]) for pair in of_seeds.values()]
        ratios = sorted(ours / peer for ours, peer in speeds)
        ours, peer = (f"{statistics.median(column):,.0f}" for column in zip(*speeds, strict=True))
        mode = next(iter(of_seeds.values()))[False]["arm"].split()[2].removesuffix(",")
        ratio = f"{statistics.median(ratios):.2f}× [{ratios[0]:.2f}–{ratios[-1]:.2f}]"
        cpu = hardware.removeprefix("2 CPU cores, ").partition(" with")[0]
        rows.append([f"`{work}`, {unit}/s", cpu, ours, peer, f"`{mode}`", ratio, len(ratios)])
    return table("workload | CPU | ours | TRL | TRL's mode | ratio | n", rows)


def predictions() -> str:
    """Return what the bench predicts of a GPU, what each GPU did, and what the prediction assumes."""
    measured: dict[str, dict[str, dict]] = {}
    for record in records_of("gpu"):
        measured.setdefault(record["case"], {})[record["gpu"]] = record.get("numbers", {})
    rows = []
    for case, predicted in gpu_bench.TABLES["predictions"].items():
        for name, (number, assumed, _) in predicted.items():
            for gpu, numbers in measured.get(case, {"–": {}}).items():
                expected = numbers.get(number) if isinstance(number, str) else number
                cells = ["–", gpu, "–"]
                if name in numbers:
                    cells = [f"{numbers[name]:.3g}", gpu, f"{numbers[name] / expected:.2f}"]
                predicted_cell = "the plan" if expected is None else f"{expected:.3g}"
                rows.append([case, name, predicted_cell, *cells, assumed])
    return table(
        "part | number | predicted | measured | GPU | ratio | the prediction assumes", rows
    )


def options() -> str:
    """Return all options in their groups, and the keyword arguments of the losses."""
    blocks = []
    for section, declared in itertools.groupby(OPTIONS.values(), lambda option: option.section):
        rows = [
            [
                f"`{option.flag}`",
                f"`{option.shown_default}`",
                allowed_values(option.kind),
                option.text.replace("|", "\\|"),
            ]
            for option in declared
        ]
        blocks.append(f"**{section}**\n\n{table('option | default | allowed | meaning', rows)}\n")
    keywords = []
    for algo, loss in LOSSES.items():
        shown = [f"`{keyword.name}={keyword.default}`" for keyword in keywords_of(loss)]
        keywords.append([f"`{algo}`", ", ".join(shown) or "none"])
    of_losses = table("`--algo` | keyword arguments and their defaults", keywords)
    return f"{''.join(blocks)}**`--algo-args`**\n\n{of_losses}"


def losses() -> str:
    """Return what each loss does, and where its formula is from."""
    rows = []
    for algo, loss in LOSSES.items():
        text = inspect.getmodule(loss).__doc__
        paper = re.search(r"arXiv (\d{4}\.\d{5})", text)
        linked = f"[{paper[1]}](https://arxiv.org/abs/{paper[1]})" if paper else "Williams 1992"
        rows.append([f"`{algo}`", linked, text.partition("\n")[0].partition(": ")[2].rstrip(".")])
    return table("`--algo` | formula as in | what it does", rows)


def acts_on(loss: Callable) -> list[str]:
    """Return what the docstring of a loss says: its ratio, level and means, and what it does at lag."""
    text = inspect.getmodule(loss).__doc__
    match = re.search(
        r"^Acts on: ([^,]+), ([^,]+), (.+)\.\nAt lag: (.+?)\.$(?=\n\n)", text, re.M | re.S
    )
    return [" ".join(part.split()) for part in match.groups()]


def at_lag() -> str:
    """Return which ratio each loss reads, how, and what it does with a stale token."""
    rows = [[f"`{algo}`", *acts_on(loss)] for algo, loss in LOSSES.items()]
    return table("`--algo` | ratio | of a | by | with stale tokens", rows)


# Records


def tables(name: str) -> str:
    """Return the tables of results/NAME/table.md. Tests make them again from the records beside it."""
    page = (RESULTS / name / "table.md").read_text(encoding="utf-8")
    parts = [part.strip() for part in page.split("\n\n")]
    return "\n\n".join(part for part in parts if part.startswith("|")) + "\n"


def kept(name: str, page: str = "short") -> str:
    """Return the table of a study whose records stay as they are. It is results/NAME/PAGE.md, with its origin."""
    return (RESULTS / name / f"{page}.md").read_text(encoding="utf-8").partition("\n")[2]


def machines(part: str) -> str:
    """Return what was measured of remote hosts: a part of results/swarm, medians alone."""
    page = (RESULTS / "swarm" / "table.md").read_text(encoding="utf-8")
    (block,) = (block for block in page.split("\n\n") if block.startswith(f"| {part} |"))
    return lines(re.sub(r" \[[^]]*\]", "", block).splitlines())


def certificate() -> str:
    """Return when the certificate and the probe noticed each fault, and its false alarms in healthy runs."""
    cases: dict[str, list[dict]] = {}
    for record in records_of("certificate"):
        cases.setdefault(record["case"], []).append(record)
    faults, healthy = [], []
    for records in cases.values():
        first = records[0]
        setting = [first["lag"].replace("alpha", "α ="), first["dtype"]]
        if first["fault"] == "none":
            checks = sum(record["checks"] for record in records)
            false_alarms = sum(record["false_alarms"] for record in records)
            values = [
                f"{max(record[f'{name}_max'] for record in records):.2g}"
                for name in ("worst", "version_before_sigmas", "version_after_sigmas")
            ]
            healthy.append([*setting, checks, false_alarms, *values])
            continue
        rules = {rule for record in records for rule in record["rules"]}
        steps = [_steps_until(record, "noticed_step") for record in records]
        steps_of_probe = [_steps_until(record, "probe_noticed_step") for record in records]
        row = [f"`{first['fault']}`", *setting, ", ".join(steps), ", ".join(sorted(rules)) or "–"]
        faults.append([*row, ", ".join(steps_of_probe)])
    fault_heading = (
        "fault | lag | dtype | steps until noticed, by seed | first by rule | by the probe"
    )
    healthy_heading = (
        "lag | dtype | checks | false alarms | largest `worst` | "
        "`version_before_sigmas` | `version_after_sigmas`"
    )
    return f"{table(fault_heading, faults)}\n{table(healthy_heading, healthy)}"


def _steps_until(record: dict, name: str) -> str:
    """Return the steps from the first one that trained wrong tokens, or how many passed without notice."""
    if record["first_wrong_step"] is None:
        return "no wrong token"
    if record[name] is None:
        return f"not in {record['steps'] + 1 - record['first_wrong_step']}"
    return f"{record[name] - record['first_wrong_step']}".replace("-", "−")
