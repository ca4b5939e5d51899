"""What ablate.py keeps of a grid of runs, and the tables and the figure that are made of it.

OUT/cells.jsonl has a line per run: its `cell` (loss, seed and the other options that vary: its *setting*), how it was
made, and its curves. A run that ended with an error is in no mean.

Runs of one seed share problems, first weights and sampling seeds. So a loss on stale data is compared with the same
loss and seed on fresh data (async_ratio 0, publish_delay 0), not mean with mean. Both are compared at the same version
that *sampled* a batch: a policy is no worse because its reward is seen later.
"""

import json
import math
import shlex
import statistics
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.figure import Figure
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.weightstats import DescrStatsW

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
    "drift_k3": "drift/k3", "entropy": "loss/entropy", "ess": "loss/ess", "grad_norm": "loss/grad_norm",
}  # fmt: skip
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
MIN_SEEDS = 3
"""Fewer show nothing: two that happen to be alike make an interval of no width."""


# Records


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
    is_replay = "of" in cell
    form, kept = ("{:.4g}", REPLAY_SERIES) if is_replay else ("{:.5f}", SERIES)
    record = {name: run.info[name] for name in ("git_commit", "hardware", "packages")}
    record["git_dirty"] = bool(run.info["git_diff"])
    record["evaluations"] = list(evaluations(run.metrics).items())
    if is_replay:
        last_step = run.metrics["step"].iloc[-1]
        record["command"] = shlex.join(run.info["command"])
        record["seed"] = run.info["config"]["seed"]
        record["accuracy"] = record["evaluations"][-1][1] if record["evaluations"] else None
        record["weights_sha256"] = weights_sha256(run.path / "checkpoints" / f"step_{last_step}")
    record["series"] = {
        name: [float(form.format(value)) for value in run.metrics[metric].astype(float)]
        for name, metric in kept.items()
    }
    return record


def metrics_of(record: dict) -> pd.DataFrame:
    """The curves of a cell under the names of metrics.jsonl; the line of an evaluation has no meaning."""
    metrics = pd.DataFrame({name: record["series"][kept] for kept, name in SERIES.items()})
    metrics["step"] = range(1, len(metrics) + 1)
    evaluated = pd.DataFrame(
        record["evaluations"], columns=["eval/policy_version", "eval/accuracy"]
    )
    return metrics.join(evaluated)


def key(cell: dict) -> str:
    """What tells a cell from the others: its options."""
    return json.dumps(cell, sort_keys=True)


def loss(cell: dict) -> str:
    """The loss of a cell with the loss's options, as --algos has it."""
    return ":".join(filter(None, [cell["algo"], " ".join(cell.get("algo_args", []))]))


def setting(cell: dict) -> dict:
    """The options of a cell that are neither loss nor seed."""
    return {
        name: value for name, value in cell.items() if name not in ("algo", "algo_args", "seed")
    }


def runs_of(records: list[dict]) -> pd.DataFrame:
    """A row per run, in order of setting, loss and seed: its options, setting and loss, and the record.

    Settings are in the order of their values. Losses are in that of LOSSES, and other losses are last.
    """
    rows, settings, losses = [], {}, {}
    for record in records:
        cell, values = record["cell"], setting(record["cell"])
        text = ", ".join(f"`{name}` {show(value)}" for name, value in values.items())
        settings[text] = [sort_key(value) for value in values.values()]
        losses[loss(cell)] = ([*LOSSES, cell["algo"]].index(cell["algo"]), loss(cell))
        rows.append({**cell, "setting": text, "loss": loss(cell), "record": record})
    runs = pd.DataFrame(rows)
    for name, order in (("setting", settings), ("loss", losses)):
        runs[name] = pd.Categorical(runs[name], sorted(order, key=order.get))
    return runs.sort_values(["setting", "loss", "seed"], ignore_index=True)


def summaries(records: list[dict]) -> pd.DataFrame:
    """As `runs_of`, with the accuracy before training, the error, and what summarise says of each run."""
    runs = runs_of(records)
    rows = []
    for record in runs["record"]:
        metrics = metrics_of(record)
        initial = evaluations(metrics).groupby(level=0).mean().get(0)
        error = " ".join(record.get("error", "").split()) or None
        rows.append({"initial": initial, "error": error, **summarise(metrics)})
    return runs.join(pd.DataFrame(rows))


# Accuracy


def table(records: list[dict]) -> list[str]:
    """Final held-out accuracies, losses × settings, and a caption."""
    runs = summaries(records)
    n = int(runs.groupby(["loss", "setting"], observed=True).size().max())

    def cell(group: pd.DataFrame) -> str:
        """Mean and spread, with their number where it is not n, and how many runs failed."""
        values = group.loc[group["error"].isna(), "accuracy"].dropna().tolist()
        failed = group["error"].notna().sum()
        fewer = f", n = {len(values)}" if len(values) < n else ""
        parts = [f"{spread(values, '{:.3f}')}{fewer}"] if values else []
        parts += [f"failed {failed}/{len(group)}"] if failed else []
        return ", ".join(parts) or MISSING

    # losses share version 0
    initial = runs.groupby(["setting", "seed"], observed=True)["initial"].mean().reset_index()
    rows = pd.concat(
        [
            initial.assign(loss="before training", accuracy=initial["initial"], error=None),
            runs.assign(loss="`" + runs["loss"].astype(str) + "`", accuracy=runs["accuracy_last"]),
        ]
    )
    columns = ["accuracy", "error"]
    texts = rows.groupby(["loss", "setting"], sort=False, observed=True)[columns].apply(cell)
    heads = ["before training", *(f"`{name}`" for name in runs["loss"].cat.categories)]
    cells = texts.unstack().reindex(heads, columns=runs["setting"].cat.categories).fillna(MISSING)
    samples = sorted(runs.loc[runs["error"].isna(), "samples"])
    trained = " to ".join(map(str, dict.fromkeys(samples[:1] + samples[-1:]))) or MISSING
    spread_text = f"mean ± standard deviation over n = {n} seeds" if n > 1 else "n = 1 seed"
    failed_text = "; failed k/m: k of m runs ended with an error, the mean is of the others"
    return [
        *markdown(["", *cells.columns], cells.reset_index().to_numpy()),
        "",
        f"Final held-out accuracy, {spread_text}{failed_text if runs['error'].any() else ''}. Samples trained on, "
        f"per run: {trained}. `publish_delay` is in steps.",
    ]


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
    measured = {"area": reward.mean(), "level": math.nan, "oscillation": math.nan}
    late = reward[reward.index >= start]
    if len(late) >= 5:
        residuals = late - np.polyval(np.polyfit(late.index, late, 1), late.index)
        measured["level"] = late.mean()
        measured["oscillation"] = math.sqrt((residuals**2).sum() / (len(late) - 2))
    return pd.Series(measured)


def difference(run: dict, base: dict, end: int) -> dict:
    """MEASURES of a record less those of a `base`, and the level of the base, by version up to `end`."""
    reward, base_reward = (reward_by_version(record).loc[:end] for record in (run, base))
    common = reward.index.intersection(base_reward.index)
    steps = len(run["series"]["reward"])
    measured, of_base = (measure(each[common], steps // 2) for each in (reward, base_reward))
    final, base_final = (dict(each["evaluations"]).get(steps, math.nan) for each in (run, base))
    window = {"seed": run["cell"]["seed"], "start": steps // 2, "end": end}
    return {**window, "base": of_base["level"], **(measured - of_base), "final": final - base_final}


def fresh_of(record: dict, runs: dict[str, dict]) -> dict | None:
    """The run on fresh data with a record's loss, options and seed, or grpo's where that is the same gradient.

    On fresh data with one update a step the ratio is 1, and there all losses that come with the code have one gradient.
    A loss with options may have another, so nothing stands in for it.
    """
    fresh = record["cell"] | {"async_ratio": 0.0, "publish_delay": 0}
    several = any("minibatches" in word for word in record.get("options", ()))
    if key(fresh) in runs or fresh.get("minibatches", 1) != 1 or several:
        return runs.get(key(fresh))
    has_one_gradient = fresh["algo"] in LOSSES and not fresh.get("algo_args")
    return runs.get(key(fresh | {"algo": "grpo"})) if has_one_gradient else None


def differences(records: list[dict]) -> pd.DataFrame:
    """A row per run on stale data: its MEASURES less those of `fresh_of`. Empty if the grid has no such pairs.

    All are compared up to one version, the last that sampled in every run: later ones are of runs with less lag alone.
    """
    finished = [record for record in records if "error" not in record]
    if not finished:
        return pd.DataFrame()
    runs = {key(record["cell"]): record for record in finished}
    pairs = [(run, fresh_of(run.record, runs)) for run in runs_of(finished).itertuples()]
    pairs = [(run, fresh) for run, fresh in pairs if fresh not in (None, run.record)]
    end = min((int(reward_by_version(run.record).index[-1]) for run, _ in pairs), default=0)
    return pd.DataFrame(
        {"loss": run.loss, "setting": run.setting, **difference(run.record, fresh, end)}
        for run, fresh in pairs
    )


def compare(found: pd.DataFrame, measured: str = "level") -> pd.DataFrame:
    """A row per setting and loss: the seeds' `values`, their `mean`, its 95 % t-interval `low` … `high`, `p`, `stays`.

    It stays if p, two-sided by Student's t, passes Holm's correction over all rows at 0.05.
    """
    by_loss = found.dropna(subset=measured).groupby(["setting", "loss"], sort=False, observed=True)[
        measured
    ]
    rows = by_loss.agg(list).rename("values").reset_index()
    if rows.empty:
        return rows
    columns = ["mean", "low", "high", "p"]
    rows[columns] = [interval(values) for values in rows["values"]]
    return rows.assign(stays=multipletests(rows["p"], alpha=0.05, method="holm")[0])


def interval(values: list[float]) -> tuple[float, float, float, float]:
    """Mean, both ends of its 95 % t-interval, and two-sided p; too few seeds have no ends (NaN) and p = 1.

    Seeds that are all alike, as coarse accuracies can be, prove nothing: p = 1.
    """
    statistic = DescrStatsW(values)
    if len(values) < MIN_SEEDS:
        return statistic.mean, math.nan, math.nan, 1.0
    p = statistic.ttest_mean()[1] if statistic.std_mean > 1e-12 else 1.0
    return statistic.mean, *statistic.tconfint_mean(), p


def shown(values: list[float], form: str = "{:+.3f}") -> str:
    """The mean and its interval, or how few values there are; a form without a sign is for what is no difference."""
    mean, low, high, _ = interval(values)
    ends = f"n = {len(values)}"
    if len(values) >= MIN_SEEDS:
        ends = f"{form.format(low)} … {form.format(high)}"
    return f"{form.format(mean)} ({ends})".replace("-", "−")


def compact(rows: pd.DataFrame) -> list[str]:
    """The table of what `compare` found, a row per loss and a column per setting, and how much of it is chance."""
    table = cells_of(rows)
    n = sorted({len(values) for values in rows["values"]})
    seeds = " to ".join(map(str, dict.fromkeys((n[0], n[-1]))))
    num_intervals = rows["low"].notna().sum()
    outside = ((rows["low"] > 0) | (rows["high"] < 0)).sum()
    return [
        *markdown(["loss", *table], table.reset_index().to_numpy()),
        "",
        f"n = {seeds} seeds; mean (95 % t-interval). {outside} of {num_intervals} intervals leave zero out, by chance "
        f"alone {0.05 * num_intervals:.1f} would; {rows['stays'].sum()}, in bold, after Holm's correction over "
        f"{len(rows)}.",
    ]


def cells_of(rows: pd.DataFrame) -> pd.DataFrame:
    """What `compare` found as text, a row per loss and a column per setting; bold stays after the correction."""
    texts = rows["values"].map(shown)
    rows = rows.assign(text=texts.where(~rows["stays"], "**" + texts + "**"))
    table = rows.set_index(["loss", "setting"])["text"].unstack(fill_value=MISSING)
    table = table.loc[rows["loss"].unique(), rows["setting"].unique()]
    return table.rename(lambda name: f"`{name}`")


def paired_page(found: pd.DataFrame) -> list[str]:
    """A table for each measure of the `differences` of a grid, with what it is; nothing if there are none."""
    if found.empty:
        return []
    page = [
        "A loss on stale data less the same loss and seed on fresh data (`async_ratio` and `publish_delay` 0), by the "
        "policy version that sampled. Runs of a seed share first weights, sampling seeds, and the problems of a step. "
        "Intervals take differences as normal. Where a loss has no fresh run, `grpo`'s serves: with one update a step "
        "they have one gradient there. "
        f"Half of the steps is version {found['start'].max()}, the last that sampled in all runs {found['end'].max()}."
    ]
    for name, text in MEASURES.items():
        rows = compare(found, name)
        page += [] if rows.empty else ["", f"**{text}.**", "", *compact(rows)]
    return page


# Report


def replay_table(records: list[dict]) -> list[str]:
    """Recorded runs first, then a row per loss: mean ± standard deviation over the runs."""
    rows = []
    for record in (record for record in records if "error" not in record):
        is_recorded = record["cell"]["kind"] == RECORDED
        name = f"{RECORDED}, " * is_recorded + f"`{loss(record['cell'])}`"
        row = {"trained with": name, "accuracy": record["accuracy"]}
        for column, values in record["series"].items():
            row[column] = statistics.fmean(values[-max(1, len(values) // 10) :])
        rows.append(row)
    lines = [
        [name, len(runs), *(spread(runs[c], form) for c, (_, form) in REPLAY_COLUMNS.items())]
        for name, runs in pd.DataFrame(rows).groupby("trained with", sort=False)
    ]
    headings = [heading for heading, _ in REPLAY_COLUMNS.values()]
    return markdown(["trained with", "n", *headings], lines)


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
        tables["paired.md"] = paired_page(differences(records))
        runs = summaries(records)
        options = list(dict.fromkeys(name for record in records for name in record["cell"]))
        summary = runs[[*CSV]].rename(columns=CSV)
        summary = summary.map(lambda value: round(value, 5) if isinstance(value, float) else value)
        csv = runs[options].join(summary)
        csv.to_csv(out / "cells.csv", index=False, lineterminator="\n")
        _draw(runs, out / "curves.png")
    for name, lines in tables.items():
        if lines:
            (out / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(tables["table.md"]))
    print(*sorted(path for path in out.iterdir() if path.is_file()), sep="\n")


def _draw(runs: pd.DataFrame, path: Path) -> None:
    """Held-out accuracy over samples, a panel per setting: mean of the seeds that did not fail, lowest and highest."""
    settings = runs["setting"].cat.categories
    num_columns, num_rows = min(3, len(settings)), -(-len(settings) // 3)
    figure = Figure(figsize=(4 * num_columns + 4, 3.5 * num_rows), layout="constrained")
    axes = figure.subplots(num_rows, num_columns, sharex=True, sharey=True, squeeze=False).flat
    for panel, name in zip(axes, settings, strict=False):
        panel.set_prop_cycle(color=colormaps["tab20"].colors)
        finished = runs[(runs["setting"] == name) & runs["error"].isna()]
        for loss_name in runs["loss"].cat.categories:
            records = finished.loc[finished["loss"] == loss_name, "record"]
            points = [accuracy_over_samples(metrics_of(record)) for record in records]
            points = pd.concat([pd.Series(dtype=float), *points]).groupby(level=0)
            panel.plot(points.mean(), marker=".", label=loss_name)
            panel.fill_between(points.mean().index, points.min(), points.max(), alpha=0.15)
        panel.set_title(name.replace("`", ""), fontsize="medium")
        panel.grid(alpha=0.3)
    for panel in axes[len(settings) :]:
        panel.remove()
    figure.supxlabel("samples trained on")
    figure.supylabel("held-out accuracy")
    title = "mean of the seeds,\nlowest to highest"
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper", title=title)
    figure.savefig(path, dpi=100)


def accuracy_over_samples(metrics: pd.DataFrame) -> pd.Series:
    """Held-out accuracy over the samples that its version had been trained on."""
    accuracy = evaluations(metrics).groupby(level=0).last().rename("accuracy")
    points = progress(metrics)[["samples"]].join(accuracy).dropna()
    return points.set_index("samples")["accuracy"]
