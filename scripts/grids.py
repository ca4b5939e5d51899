"""What ablate.py keeps of a grid of runs, and the tables and the figure that are made of it.

OUT/cells.jsonl has a line per run: its `cell` (loss, seed and what else is varied: its *setting*), how it was made and
its curves. A run that ended with an error is in no mean.

Runs of one seed share problems, first weights and sampling seeds. So a loss on stale data is compared with the same
loss and seed on fresh data, async_ratio 0 and publish_delay 0, and not mean with mean. The two are compared at the same
version that *sampled* a batch: a reward that is seen later because weights are published later is no worse a policy.
"""

import json
import math
import shlex
import statistics
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.figure import Figure
from scipy import stats

from algos import LOSSES
from asyncrl.runlog.batches import weights_sha256
from scripts.lines import markdown, read
from scripts.runs import Run, evaluations, progress, summarise
from scripts.table import MISSING, show, sort_key, spread

SERIES = {
    "reward": "reward/mean", "staleness_mean": "staleness/mean", "staleness_max": "staleness/max",
    "step_s": "time/step_s", "samples": "samples",
}  # fmt: skip
"""What a cell keeps of every step: its name in the record and in metrics.jsonl."""
REPLAY_SERIES = {
    "drift_k3": "drift/k3",
    "entropy": "loss/entropy",
    "ess": "loss/ess",
    "grad_norm": "loss/grad_norm",
}
CSV = {
    "steps": "steps", "samples": "samples", "accuracy_last": "final_accuracy", "accuracy_best": "best_accuracy",
    "reward_last": "final_reward", "staleness_settled": "staleness_mean", "staleness_max": "staleness_max",
    "seconds": "seconds", "error": "error",
}  # fmt: skip
"""Columns of cells.csv beside the options: key of the summary, heading."""
REPLAY_COLUMNS = {
    "accuracy": ("held-out accuracy of the last weights", "{:.3f}"),
    "drift_k3": ("KL(behavior ‖ current), nats per token", "{:.4f}"),
    "entropy": ("entropy, nats per token", "{:.3f}"), "ess": ("effective sample size", "{:.3f}"),
}  # fmt: skip
"""Columns of the table of replays; all but the first are means over the last tenth of the steps."""
RECORDED = "recorded run"
MEASURES = {
    "level": "Level: mean training reward from the version of half of the steps to the last that sampled in all runs",
    "area": "Area: mean training reward of all versions up to that one, however many batches each sampled",
    "oscillation": "Oscillation: standard deviation of the reward around a straight line through the versions of level",
    "final": "Final: held-out accuracy of the last weights",
}
"""What is compared of two runs; the last is of whole runs, not by version. Oscillation uses every point and leaves a
trend out; the largest drop from a running maximum would rest on two points, and grow with their number."""
FEW, UNCLEAR, BELOW, ABOVE = (
    "too few seeds to say",
    "not told apart from zero",
    "below zero",
    "above zero",
)
MIN_SEEDS = 3
"""Fewer show nothing: two that happen to be alike make an interval of no width."""
NARROW = 0.02
"""An interval that includes zero and is within this says that there is little; a wider one says nothing."""


def read_records(path: Path) -> list[dict]:
    """The records of a cells.jsonl or replays.jsonl, the last one of each cell; none if there is no such file.

    Raises ValueError, naming the line, if one is broken.
    """
    records = {}
    for number, record in enumerate(read(path), start=1):
        try:
            if "of" in record:  # older records of replays have the parts of their cell apart
                record["cell"] = {name: record[name] for name in ("kind", "of", "algo")}
            records[key(record["cell"])] = record
        except (KeyError, TypeError) as error:
            what = f"{path}, line {number} is not a cell ({type(error).__name__}: {error})"
            raise ValueError(f"{what}; delete the line and ablate.py runs its cell again") from None
    return list(records.values())


def record_of(run: Run, cell: dict) -> dict:
    """What is kept of a cell's run: provenance, evaluations and curves; of a replay also its last weights."""
    is_replay, last = "of" in cell, run.metrics["step"].iloc[-1]
    form, kept = ("{:.4g}", REPLAY_SERIES) if is_replay else ("{:.5f}", SERIES)
    record = {name: run.info[name] for name in ("git_commit", "hardware", "packages")}
    record |= {
        "git_dirty": bool(run.info["git_diff"]),
        "evaluations": list(evaluations(run.metrics).items()),
    }
    if is_replay:
        record |= {"command": shlex.join(run.info["command"]), "seed": run.info["config"]["seed"]}
        record["accuracy"] = record["evaluations"][-1][1] if record["evaluations"] else None
        record["weights_sha256"] = weights_sha256(run.path / "checkpoints" / f"step_{last}")
    series = {name: run.metrics[metric].to_numpy(float).tolist() for name, metric in kept.items()}
    return record | {
        "series": {name: [float(form.format(v)) for v in values] for name, values in series.items()}
    }


def metrics_of(record: dict) -> pd.DataFrame:
    """The curves of a cell under the names of metrics.jsonl; on which lines its evaluations stand says nothing."""
    metrics = pd.DataFrame({name: record["series"][kept] for kept, name in SERIES.items()})
    metrics["step"] = range(1, len(metrics) + 1)
    return metrics.join(
        pd.DataFrame(record["evaluations"], columns=["eval/policy_version", "eval/accuracy"])
    )


def key(cell: dict) -> str:
    """What tells a cell from the others."""
    return json.dumps(cell, sort_keys=True)


def loss(cell: dict) -> str:
    """The loss of a cell with its own options, as --algos has it."""
    return ":".join(filter(None, [cell["algo"], " ".join(cell.get("algo_args", []))]))


def setting(cell: dict) -> dict:
    """The options of a cell that are neither loss nor seed."""
    return {
        name: value for name, value in cell.items() if name not in ("algo", "algo_args", "seed")
    }


def summaries(records: list[dict]) -> pd.DataFrame:
    """A row per run, in order of setting, loss and seed: its options, setting and loss, and what summarise says.

    Settings are in the order of their values, losses in that of asyncrl/config.py; those that it does not know are
    last.
    """
    runs, settings, losses, known = [], {}, {}, [*LOSSES]
    for record in records:
        cell, metrics = record["cell"], metrics_of(record)
        own = {
            "setting": ", ".join(f"`{k}` {show(v)}" for k, v in setting(cell).items()),
            "loss": loss(cell),
        }
        settings[own["setting"]] = [sort_key(value) for value in setting(cell).values()]
        losses[own["loss"]] = (
            known.index(cell["algo"]) if cell["algo"] in known else len(known),
            own["loss"],
        )
        own["initial"] = evaluations(metrics).groupby(level=0).mean().get(0)
        own["error"] = " ".join(record.get("error", "").split()) or None
        runs.append({**cell, **own, **summarise(metrics), "record": record})
    table = pd.DataFrame(runs)
    for name, order in (("setting", settings), ("loss", losses)):
        table[name] = pd.Categorical(table[name], sorted(order, key=order.get))
    return table.sort_values(["setting", "loss", "seed"], ignore_index=True)


# Accuracy


def table(records: list[dict]) -> list[str]:
    """Final held-out accuracies, losses × settings, and a caption."""
    runs = summaries(records)
    n = int(runs.groupby(["loss", "setting"], observed=True).size().max())
    by_setting = dict(list(runs.groupby("setting", observed=True)))
    # losses share version 0
    initial = [of.groupby("seed")["initial"].mean() for of in by_setting.values()]
    lines = [["before training", *(_mean(values, n) for values in initial)]]
    for name in runs["loss"].cat.categories:
        chosen = [of[of["loss"] == name] for of in by_setting.values()]
        lines.append(
            [
                f"`{name}`",
                *(_mean(of["accuracy_last"][of["error"].isna()], n, of["error"]) for of in chosen),
            ]
        )
    finished = runs[runs["error"].isna()]
    samples = sorted(finished["samples"].tolist())
    trained = " to ".join(map(str, dict.fromkeys(samples[:1] + samples[-1:]))) or MISSING
    failed = "; failed k/m: k of m runs ended with an error, the mean is of the others" * (
        len(finished) < len(runs)
    )
    of = f"mean ± standard deviation over n = {n} seeds" if n > 1 else "n = 1 seed"
    caption = f"Final held-out accuracy, {of}{failed}. Samples trained on, per run: {trained}."
    return [*markdown(["", *by_setting], lines), "", f"{caption} `publish_delay` is in steps."]


def _mean(values: pd.Series, n: int, errors: pd.Series | None = None) -> str:
    """Mean and spread, with their number where it is not n, and how many runs failed."""
    values = values.dropna().tolist()
    shown = (
        [spread(values, "{:.3f}") + f", n = {len(values)}" * (len(values) < n)] if values else []
    )
    if errors is not None and errors.notna().any():
        shown.append(f"failed {errors.notna().sum()}/{len(errors)}")
    return ", ".join(shown) or MISSING


# Pairs


def reward_by_version(record: dict) -> pd.Series:
    """Mean training reward by the policy version that sampled: the batch of step s is of version s − 1 − staleness.

    With publish delay K and async_ratio 0 that is exactly version max(0, s − 1 − K); version 0 sampled K + 1 batches,
    which are averaged. With an async_ratio the mean version of a batch counts, and rewards are interpolated between.
    """
    reward, staleness = (np.array(record["series"][name]) for name in ("reward", "staleness_mean"))
    by_version = pd.Series(reward, np.arange(len(reward)) - staleness).groupby(level=0).mean()
    versions = np.arange(math.ceil(by_version.index[0]), math.floor(by_version.index[-1]) + 1)
    return pd.Series(np.interp(versions, by_version.index, by_version), versions)


def measure(reward: pd.Series, start: int) -> pd.Series:
    """The MEASURES by version; the last part begins at version `start`, and NaN says that it is too short."""
    late, measured = (
        reward[reward.index >= start],
        {"area": reward.mean(), "level": math.nan, "oscillation": math.nan},
    )
    if len(late) >= 5:
        residuals = late - np.polyval(np.polyfit(late.index, late, 1), late.index)
        measured |= {
            "level": late.mean(),
            "oscillation": math.sqrt((residuals**2).sum() / (len(late) - 2)),
        }
    return pd.Series(measured)


def difference(run: dict, base: dict, end: int) -> dict:
    """MEASURES of a record less those of a `base`, and the level of that; by version at those up to `end` in both."""
    one, other = (reward_by_version(of).loc[:end] for of in (run, base))
    steps, common = len(run["series"]["reward"]), one.index.intersection(other.index)
    start = steps // 2
    of_base = measure(other[common], start)
    less = measure(one[common], start) - of_base
    less["final"] = np.subtract(
        *(dict(of["evaluations"]).get(steps, math.nan) for of in (run, base))
    )
    return {
        "seed": run["cell"]["seed"],
        "start": start,
        "end": end,
        "base": of_base["level"],
        **less,
    }


def fresh_of(record: dict, runs: dict[str, dict]) -> dict | None:
    """The run on fresh data with a record's loss, options and seed, or grpo's where that is the same gradient.

    On fresh data with one update a step the ratio is 1, and there all losses that come with the code have one gradient;
    what options of a loss's own do is not known, so then there is no other.
    """
    fresh = record["cell"] | {"async_ratio": 0.0, "publish_delay": 0}
    several = fresh.get("minibatches", 1) != 1 or any(
        "minibatches" in word for word in record.get("options", ())
    )
    others = (
        []
        if several or fresh.get("algo_args") or fresh["algo"] not in LOSSES
        else [fresh | {"algo": "grpo"}]
    )
    return next((runs[key(cell)] for cell in (fresh, *others) if key(cell) in runs), None)


def differences(records: list[dict]) -> pd.DataFrame:
    """A row per run on stale data: its MEASURES less those of `fresh_of`. Empty if the grid has no such pairs.

    All are compared up to one version, the last that sampled in every run: later ones are of runs with less lag alone.
    """
    runs, pairs = {key(record["cell"]): record for record in records if "error" not in record}, []
    for run in summaries(records).itertuples():
        fresh, is_fresh = fresh_of(run.record, runs), not run.async_ratio and not run.publish_delay
        if fresh is not None and not is_fresh and "error" not in run.record:
            pairs.append((run, fresh))
    end = min((int(reward_by_version(run.record).index[-1]) for run, _ in pairs), default=0)
    return pd.DataFrame(
        {"loss": r.loss, "setting": r.setting, **difference(r.record, f, end)} for r, f in pairs
    )


def compare(found: pd.DataFrame, measured: str = "level") -> pd.DataFrame:
    """A row per setting and loss: `values` of the seeds, `ends` of their interval, what it `says`, if that `stays`.

    It stays if p, by Student's t, passes Holm's correction over all rows at 0.05.
    """
    by = found.dropna(subset=measured).groupby(["setting", "loss"], sort=False, observed=True)[
        measured
    ]
    rows = pd.DataFrame([{"setting": s, "loss": of, "values": list(v)} for (s, of), v in by])
    if len(rows):
        p = rows["values"].map(_p).sort_values()
        rows = rows.assign(
            ends=rows["values"].map(interval),
            says=rows["values"].map(verdict),
            stays=(p <= 0.05 / np.arange(len(p), 0, -1)).cummin(),
        )
    return rows


def _p(values: list[float]) -> float:
    """Two-sided p of the mean by Student's t; 1 for too few seeds, and where all are alike, as accuracies can be."""
    if len(values) < MIN_SEEDS or (error := stats.sem(values)) < 1e-12:
        return 1.0
    return 2 * stats.t.sf(abs(statistics.mean(values)) / error, len(values) - 1)


def interval(values: list[float]) -> tuple[float, float]:
    """95 % interval of the mean by Student's t: mean ± t·SD/√n, for n = 3 ± 2.48 SD; all numbers for one value."""
    if len(values) < 2:
        return -math.inf, math.inf
    half = stats.t.ppf(0.975, len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return statistics.mean(values) - half, statistics.mean(values) + half


def verdict(values: list[float]) -> str:
    """What the interval of some differences says of their mean."""
    low, high = interval(values)
    if len(values) < MIN_SEEDS:
        return FEW
    return BELOW if high < 0 else ABOVE if low > 0 else UNCLEAR


def shown(values: list[float], form: str = "{:+.3f}") -> str:
    """The mean and its interval; a form without a sign is for what is no difference."""
    ends = [form.format(end) for end in interval(values)] if len(values) > 1 else ["one seed"]
    return f"{form.format(statistics.mean(values))} ({' … '.join(ends)})".replace("-", "−")


def compact(rows: pd.DataFrame, what: str = "loss") -> list[str]:
    """The table of what `compare` found, a row per loss and a column per setting, and how much of it is chance."""
    cells = {
        (r.setting, r.loss): f"**{shown(r.values)}**" if r.stays else shown(r.values)
        for r in _each(rows)
    }
    settings, losses = list(dict.fromkeys(rows["setting"])), list(dict.fromkeys(rows["loss"]))
    lines = [[f"`{one}`", *(cells.get((s, one), MISSING) for s in settings)] for one in losses]
    n, judged = sorted({len(values) for values in rows["values"]}), rows[rows["says"] != FEW]
    text = (
        f"n = {' to '.join(map(str, dict.fromkeys((n[0], n[-1]))))} seeds; mean (95 % t-interval). "
    )
    text += f"{judged['says'].isin((BELOW, ABOVE)).sum()} of {len(judged)} intervals leave zero out, by chance alone "
    text += f"{0.05 * len(judged):.1f} would; {rows['stays'].sum()}, in bold, after Holm's correction over {len(rows)}."
    text += f" {len(rows) - len(judged)} have {FEW}." if len(judged) < len(rows) else ""
    return [*markdown([what, *settings], lines), "", text]


def _each(rows: pd.DataFrame) -> list[SimpleNamespace]:
    return [SimpleNamespace(**row) for row in rows.to_dict("records")]


def sentences(rows: pd.DataFrame) -> list[str]:
    """What each setting's intervals say, a point each, with every loss under what is said of it."""
    points = []
    for setting, of in rows.groupby("setting", sort=False, observed=True):
        each = _each(of)
        clear, unclear = (
            [r for r in each if r.says in (BELOW, ABOVE)],
            [r for r in each if r.says == UNCLEAR],
        )
        narrow = [r for r in unclear if max(map(abs, r.ends)) < NARROW]
        named = {
            FEW.capitalize(): [r for r in each if r.says == FEW],
            f"Include zero, within ±{NARROW}": narrow,
            "Include zero, and are wider": [r for r in unclear if r not in narrow],
            "Leave zero out before correction only": [r for r in clear if not r.stays],
            f"Leave zero out after Holm's correction over {len(rows)} too": [
                r for r in clear if r.stays
            ],
        }
        text = f"- {setting}: {len(clear)} of {len(clear) + len(unclear)} intervals leave zero out."
        for title, which in named.items():
            said = (
                f"`{r.loss}`" if r in narrow else f"`{r.loss}` {shown(r.values)}" for r in which
            )
            text += f"\n  - {title}: {'; '.join(said)}." if which else ""
        points.append(text)
    return points


def paired_page(records: list[dict]) -> list[str]:
    """All tables of pairs with what they are; nothing if the grid has no pairs."""
    if (found := differences(records)).empty:
        return []
    compared = {text: compare(found, name) for name, text in MEASURES.items()}
    tables = [
        ["", f"**{text}.**", "", *compact(rows)] for text, rows in compared.items() if len(rows)
    ]
    return [
        "A loss on stale data less the same loss and seed on fresh data (`async_ratio` and `publish_delay` 0), by the "
        "policy version that sampled. Runs of a seed share first weights, sampling seeds, and the problems of a step. "
        "Intervals take differences as normal. Where a loss has no fresh run, `grpo`'s serves: with one update a step "
        "they have one gradient there.",
        *(line for lines in tables for line in lines),
    ]


# Report


def replay_table(records: list[dict]) -> list[str]:
    """Recorded runs first, then a row per loss: mean ± standard deviation over the runs."""
    groups: dict[str, list[dict]] = {}
    for record in (record for record in records if "error" not in record):
        tenths = {
            name: statistics.fmean(v[-max(1, len(v) // 10) :])
            for name, v in record["series"].items()
        }
        name = f"{RECORDED}, " * (record["cell"]["kind"] == RECORDED) + f"`{loss(record['cell'])}`"
        groups.setdefault(name, []).append({"accuracy": record["accuracy"], **tenths})
    lines = []
    for name, chosen in groups.items():
        cells = [
            spread([one[c] for one in chosen], form) for c, (_, form) in REPLAY_COLUMNS.items()
        ]
        lines.append([name, str(len(chosen)), *cells])
    return markdown(
        ["trained with", "n", *(heading for heading, _ in REPLAY_COLUMNS.values())], lines
    )


def report(out: Path) -> None:
    """Write the tables and the figure of a grid or of replays, print the first table and where everything is.

    Raises ValueError if nothing is finished.
    """
    records, replays = read_records(out / "cells.jsonl"), read_records(out / "replays.jsonl")
    if not records and not replays:
        raise ValueError(
            f"{out / 'cells.jsonl'} has no finished cell; scripts/ablate.py --out {out} makes it"
        )
    tables = {"table.md": table(records) if records else replay_table(replays)}
    if records:
        tables["paired.md"] = paired_page(records)
        runs, options = (
            summaries(records),
            dict.fromkeys(name for record in records for name in record["cell"]),
        )
        csv = (
            runs[[*CSV]]
            .map(lambda v: round(v, 5) if isinstance(v, float) else v)
            .rename(columns=CSV)
        )
        pd.concat([runs[[*options]], csv], axis=1).to_csv(
            out / "cells.csv", index=False, lineterminator="\n"
        )
        _draw(runs, out / "curves.png")
    for name, lines in tables.items():
        if lines:
            (out / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(tables["table.md"]))
    print(*sorted(path for path in out.iterdir() if path.is_file()), sep="\n")


def _draw(runs: pd.DataFrame, path: Path) -> None:
    """Held-out accuracy over samples, a panel per setting: mean of the seeds that did not fail, lowest and highest."""
    by_setting = list(runs.groupby("setting", observed=True))
    num_columns, num_rows = min(3, len(by_setting)), -(-len(by_setting) // 3)
    figure = Figure(figsize=(4 * num_columns + 4, 3.5 * num_rows), layout="constrained")
    axes = figure.subplots(num_rows, num_columns, sharex=True, sharey=True, squeeze=False).flat
    for panel, (name, of) in zip(axes, by_setting, strict=False):
        panel.set_prop_cycle(color=colormaps["tab20"].colors)
        for which in runs["loss"].cat.categories:
            records = of["record"][of["error"].isna() & (of["loss"] == which)]
            points = [accuracy_over_samples(metrics_of(record)) for record in records]
            seeds = (
                pd.concat([pd.Series(dtype=float), *points])
                .groupby(level=0)
                .agg(["mean", "min", "max"])
            )
            panel.plot(seeds.index, seeds["mean"], marker=".", label=which)
            panel.fill_between(seeds.index, seeds["min"], seeds["max"], alpha=0.15)
        panel.set_title(name.replace("`", ""), fontsize="medium")
        panel.grid(alpha=0.3)
    for panel in axes[len(by_setting) :]:
        panel.remove()
    figure.supxlabel("samples trained on")
    figure.supylabel("held-out accuracy")
    named = axes[0].get_legend_handles_labels()
    figure.legend(*named, loc="outside right upper", title="mean of the seeds,\nlowest to highest")
    figure.savefig(path, dpi=100)


def accuracy_over_samples(metrics: pd.DataFrame) -> pd.Series:
    """Held-out accuracy over the samples that its version had been trained on."""
    accuracy = evaluations(metrics).groupby(level=0).last()
    both = progress(metrics)[["samples"]].join(accuracy.rename("accuracy")).dropna()
    return both.set_index("samples")["accuracy"]
