"""Blocks of README.md and docs/ that are made and not written: `.venv/bin/cog -r README.md docs/*.md` puts them in.

Each function returns the Markdown of one block, from the records in results/ or from the code. So a page cannot say
another number than the records: tests/test_docs.py makes all blocks again and compares.
"""

import inspect
import itertools
import re
from collections.abc import Callable, Iterable, Sequence

from algos import LOSSES
from asyncrl.config import OPTIONS, allowed_values
from asyncrl.trainer.loss_choice import keywords_of
from scripts.bench import gpu as gpu_bench
from scripts.lines import ROOT, markdown, read

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
    """Return one line that says what has run on which GPU."""
    gpus = {}
    for record in records_of("gpu"):
        if "numbers" in record:
            gpus.setdefault(record["gpu"], {})[record["case"].removesuffix(" -")] = record
    of_gpus = "; ".join(f"{gpu}: {', '.join(cases)}" for gpu, cases in gpus.items())
    return f"**What has run on which GPU.** {of_gpus or 'Nothing so far'}.\n"


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
    """Return the tables of results/NAME/table.md, which tests make again from the records beside it."""
    page = (RESULTS / name / "table.md").read_text(encoding="utf-8")
    parts = [part.strip() for part in page.split("\n\n")]
    return "\n\n".join(part for part in parts if part.startswith("|")) + "\n"


def kept(name: str, page: str = "short") -> str:
    """Return the table of a study whose records stay as they are: results/NAME/PAGE.md, which says what made it."""
    return (RESULTS / name / f"{page}.md").read_text(encoding="utf-8").partition("\n")[2]


def machines(part: str) -> str:
    """Return what was measured of remote hosts: a part of results/swarm, medians alone."""
    page = (RESULTS / "swarm" / "table.md").read_text(encoding="utf-8")
    (block,) = (block for block in page.split("\n\n") if block.startswith(f"| {part} |"))
    return lines(re.sub(r" \[[^]]*\]", "", block).splitlines())
