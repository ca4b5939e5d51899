"""Records of a grid of runs of ablate.py, and the tables and the figure that are made of them.

OUT/cells.jsonl has a line per run: its `cell`, its origin, its summary and its curves. A cell is loss, seed and the
other options that vary, its *setting*. A run that ended with an error is in no difference.

Runs of one seed share problems, first weights and sampling seeds. So runs are compared in pairs of one seed, not mean
with mean. A loss on stale data is compared with the same loss on fresh data (async_ratio 0, publish_delay 0). Each loss
is compared with the *baseline* in the same setting. Both are compared at the same version that *sampled* a batch. A
policy is no worse because its reward is seen later.
"""

import hashlib
import json
import math
import os
import re
import sys
from collections import defaultdict
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from scipy import stats

from algos import LOSSES
from scripts.lines import markdown, read
from scripts.runs import MISSING, SUMMARY, Run, evaluations, summarise
from scripts.table import COLUMNS, grouped, show, sort_key

SERIES = {
    "reward": "reward/mean", "staleness_mean": "staleness/mean", "staleness_max": "staleness/max",
    "step_s": "time/step_s", "samples": "samples", "drift_k3": "drift/k3", "entropy": "loss/entropy", "ess": "loss/ess",
    "gradient_cosine": "loss/gradient_cosine", "drift_term": "loss/drift_term", "head_mass": "loss/head_mass",
}  # fmt: skip
"""Numbers that a cell keeps of every step, if a run has them: name in the record -> name in metrics.jsonl."""
LATE_COLUMNS = {
    "drift/k3": ("KL(behavior ‖ current), nats per token", "{:.4f}"),
    "loss/entropy": ("entropy, nats per token", "{:.3f}"), "loss/ess": ("effective sample size", "{:.3f}"),
}  # fmt: skip
"""Columns of means over the last tenth of the steps."""
MEASURES = {
    "level": "Level: mean training reward of versions {start} to {end}",
    "final": "Final: held-out accuracy of the last weights",
}
"""Numbers that are compared of two runs. The last is of whole runs, not by version."""
MIN_SEEDS = 3
"""Fewer seeds are not enough. Two seeds that happen to be alike make an interval of no width."""
MIN_VERSIONS = 5
"""Versions in the second half of the steps that level needs."""
QUESTIONS = {
    "paired.md": "what do stale data cost each loss? Lagged less fresh.",
    "against.md": "is a loss better than {baseline} at the same lag?",
    "without.md": "what do the options of --without change?",
}
"""The question that each table answers."""
NOT_FINITE = re.compile(r"loss \S+ and gradient norm \S+ at update \d+ must be finite")
"""The only error that is a result. asyncrl/trainer/policy.py raises it. Another error can be of a full disk."""
DISAGREEMENT = 0.3
"""Range of the final accuracy over seeds above which a mean says little."""
SPREAD = (
    "Intervals take differences as normal. Their spread is that of the seeds, or the noise within a run where that is "
    "larger: of rewards from version to version, or of the answers that an evaluation samples."
)
"""The note of the pages on intervals. Records of older code lack the number of answers, and have no such noise."""
MAX_PRINTED = 12
"""Most differences that a report prints. Its pages have all."""
COLOURS = colormaps["tab20"].colors[::2] + colormaps["tab20"].colors[1::2]
"""Colours of losses, strong ones first."""
DASHES = "-", "--", ":", "-."
"""Styles of lines. A colour comes again with another style."""


# Records


def read_records(path: Path) -> list[dict]:
    """Return the records of a cells.jsonl, the last one of each cell. Without the file the list is empty.

    Records of older code have no summary. The table then lacks these columns, and all differences are as before.
    Raises ValueError, naming the line, if one is broken.
    """
    records = {}
    for number, record in enumerate(read(path), start=1):
        if not {"cell", "series"} <= {*record}:
            raise ValueError(
                f"{path}, line {number} is not a cell with its series; delete the line, and ablate.py runs it again"
            )
        record.setdefault("summary", dict.fromkeys([*SUMMARY, *LATE_COLUMNS]))
        record.setdefault("options", [])
        record.setdefault("code", code_version(record.get("git_commit"), None))
        records[key(record["cell"])] = record
    return list(records.values())


def record_of(run: Run) -> dict:
    """Return what is kept of a cell's run: provenance, evaluations, summary and curves."""
    record = {name: run.info[name] for name in ("git_commit", "hardware", "packages")}
    changes = run.info["git_diff"]
    record["git_dirty"] = bool(changes)
    record["code"] = code_version(run.info["git_commit"], changes)
    config = run.info["config"]
    record["updates_per_step"] = config["minibatches"] * config["optim.epochs"]
    record["evaluations"] = list(evaluations(run.metrics).items())
    num_responses = run.metrics.get("eval/problems", pd.Series(dtype=float)).dropna()
    if len(num_responses):
        record["eval_responses"] = int(num_responses.iloc[-1])
    late = run.metrics.tail(max(1, len(run.metrics) // 10)).reindex(columns=[*LATE_COLUMNS])
    numbers = summarise(run.metrics) | late.astype(float).mean().to_dict()
    record["summary"] = {
        name: None if math.isnan(number) else number for name, number in numbers.items()
    }
    record["series"] = {
        name: [
            None if math.isnan(value) else float(f"{value:.7g}")
            for value in run.metrics[metric].astype(float)
        ]
        for name, metric in SERIES.items()
        if metric in run.metrics
    }
    return record


def code_version(commit: str | None, changes: str | None) -> str | None:
    """Return a name of this code, its commit and a digest of uncommitted changes; None without git."""
    if not commit:
        return None
    digest = f" with changes {hashlib.sha256(changes.encode()).hexdigest()[:8]}" if changes else ""
    return commit[:12] + digest


def warn_of_other_code(versions: Collection[str | None]) -> None:
    """Print the versions of this code that the runs of a grid have, if there are several."""
    known = sorted(set(versions) - {None})
    if len(known) > 1:
        print(
            f"warning: runs of this grid have {len(known)} versions of this code, {', '.join(known)}; they can differ "
            "for that reason, too. A new --out keeps versions apart",
            file=sys.stderr,
        )


def key(cell: dict) -> str:
    """Return the identity of a cell: its options."""
    return json.dumps(cell, sort_keys=True)


def is_result(record: dict) -> bool:
    """Return whether a run finished, or ended because it was not finite. Older code kept other errors, too."""
    return "error" not in record or NOT_FINITE.search(record["error"]) is not None


def loss(cell: dict, *, has_whole_path: bool = False) -> str:
    """Return the loss of a cell with its options, as --algos has it. User code has only the name of its file."""
    algo = cell["algo"] if has_whole_path else os.path.basename(cell["algo"])
    return ":".join(filter(None, [algo, " ".join(cell.get("algo_args", []))]))


def loss_names(cells: Collection[dict]) -> dict[str, str]:
    """Return the name that the tables give the loss of each cell, by the cell's key.

    A loss of a file has the whole path if another file gives the same name.
    """
    algos = defaultdict(set)
    for cell in cells:
        algos[loss(cell)].add(cell["algo"])
    return {key(cell): loss(cell, has_whole_path=len(algos[loss(cell)]) > 1) for cell in cells}


def setting(cell: dict) -> dict:
    """Return the options of a cell that are neither loss nor seed."""
    left_out = ("algo", "algo_args", "seed")
    return {name: value for name, value in cell.items() if name not in left_out}


def runs_of(records: list[dict]) -> pd.DataFrame:
    """Return a row per run, in order of setting and loss: its options, setting and loss, and the record.

    Settings are in the order of their values. Losses are in that of LOSSES, and other losses are last. `loss_names`
    makes their names.
    """
    names = loss_names([record["cell"] for record in records])
    # Another order of --sweep is no other setting. The first record with the same options gives the order.
    orders: dict[frozenset, list[str]] = {}
    for record in records:
        options = setting(record["cell"])
        orders.setdefault(frozenset(options), [*options])

    def values(cell: dict) -> dict:
        return {name: cell[name] for name in orders[frozenset(setting(cell))]}

    def place(record: dict) -> tuple:
        cell = record["cell"]
        sorted_values = [sort_key(value) for value in values(cell).values()]
        return sorted_values, [*LOSSES, cell["algo"]].index(cell["algo"]), names[key(cell)]

    rows = []
    for record in sorted(records, key=place):
        cell = record["cell"]
        text = ", ".join(f"`{name}` {show(value)}" for name, value in values(cell).items())
        rows.append({**cell, "setting": text, "loss": names[key(cell)], "record": record})
    return pd.DataFrame(rows)


def summaries(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the summary of each row of `runs_of`, and its error."""
    rows = []
    for record in runs["record"]:
        error = " ".join(record.get("error", "").split())
        rows.append({"error": error, **record["summary"]})
    return pd.DataFrame(rows)


def table(runs: pd.DataFrame) -> list[str]:
    """Return the table of a grid: a row per setting and loss. Runs that failed have rows of their own."""
    columns = {name: SUMMARY[name] for name in ("samples", "reward_first", "reward_last")}
    shown = grouped(
        runs.join(summaries(runs)),
        ["setting", "loss", "error"],
        {**columns, **COLUMNS, **LATE_COLUMNS},
    )
    shown = shown.loc[:, (shown != MISSING).any()]
    note = "Staleness is a mean over all steps: with --publish-delay K it grows from 0 to K in the first K steps."
    lines = ["", f"Mean ± standard deviation over n seeds. {note}"]
    num_failed = shown.loc[shown["error"] != "", "n"].sum()
    if num_failed:
        failed = f"Of {len(runs)} runs {num_failed} failed."
        lines += ["", f"{failed} No figure, difference or interval has them."]
    else:
        shown = shown.drop(columns="error")
    return [*markdown(shown, shown.to_numpy()), *lines]


# Pairs


def num_level_versions(num_steps: int, lag: int) -> int:
    """Return the number of versions that level averages. All runs have these steps and at most this lag in steps."""
    return num_steps - num_steps // 2 - lag


def reward_by_version(record: dict) -> pd.Series:
    """Return the mean training reward by the version that sampled: the batch of step s is of s − 1 − staleness.

    With publish delay K and async_ratio 0 that is exactly version max(0, s − 1 − K). The K + 1 batches of version 0 are
    averaged. With an async_ratio the mean version of a batch counts, and rewards are interpolated between.
    """
    names = ("reward", "staleness_mean")
    reward, staleness = (np.array(record["series"][name], dtype=float) for name in names)
    by_version = pd.Series(reward, np.arange(len(reward)) - staleness).groupby(level=0).mean()
    versions = np.arange(math.ceil(by_version.index[0]), math.floor(by_version.index[-1]) + 1)
    return pd.Series(np.interp(versions, by_version.index, by_version), versions)


def measures_of(records: list[dict]) -> pd.DataFrame:
    """Return `runs_of` with the MEASURES of each run that did not fail.

    Versions count if they sampled in all runs, to `end`. `rewards` has the mean reward by version. The index has the
    key of each cell.
    NaN means that fewer than MIN_VERSIONS are left from version `start` on, or that the last weights lack an
    evaluation. The frame is empty if all failed.
    """
    if all("error" in record for record in records):
        return pd.DataFrame(columns=["loss", "record", *MEASURES])
    runs = runs_of(records)  # a failed run counts for the names of losses
    runs = runs[["error" not in record for record in runs["record"]]].copy()
    rewards = [reward_by_version(record) for record in runs["record"]]
    rewards = pd.concat(rewards, axis="columns", join="inner", keys=runs.index)
    steps = [len(record["series"]["reward"]) for record in runs["record"]]
    evaluations = [dict(record["evaluations"]) for record in runs["record"]]
    runs["start"], runs["end"] = min(steps) // 2, rewards.index[-1]
    late = rewards.loc[min(steps) // 2 :]
    runs["rewards"] = [rewards[run] for run in runs.index]
    runs["level"] = late.mean() if len(late) >= MIN_VERSIONS else math.nan
    runs["final"] = [
        of_run.get(last, math.nan) for of_run, last in zip(evaluations, steps, strict=True)
    ]
    # as if all problems were equally hard; this overstates the noise
    num_responses = [record.get("eval_responses", math.nan) for record in runs["record"]]
    runs["final_variance"] = runs["final"] * (1 - runs["final"]) / num_responses
    return runs.set_axis([key(record["cell"]) for record in runs["record"]])


def has_one_update_a_step(record: dict) -> bool:
    """Return whether a run made one update a step. A record of older code has only the words of its options.

    Any word that can give several updates counts then, also one that names a file of options.
    """
    if "updates_per_step" in record:
        return record["updates_per_step"] == 1
    words = " ".join([*record["cell"], *record["options"]])
    return re.search(r"minibatches|epochs|--(config|like)\b", words) is None


def fresh_cell(record: dict, cells: pd.Index) -> str:
    """Return the key of the cell on fresh data with a record's loss, options and seed, or grpo's instead.

    On fresh data with one update a step the ratio is 1. Then all losses that come with the code have one gradient. A
    loss with options can have another gradient, so grpo cannot replace it.
    """
    fresh = record["cell"] | {"async_ratio": 0.0, "publish_delay": 0}
    is_plain = fresh["algo"] in LOSSES and not fresh.get("algo_args")
    if key(fresh) not in cells and is_plain and has_one_update_a_step(record):
        return key(fresh | {"algo": "grpo"})
    return key(fresh)


def differences(runs: pd.DataFrame) -> pd.DataFrame:
    """Return a row per run of `measures_of` on stale data: MEASURES less those of its `fresh_cell`, as `less` does."""
    return less(runs, [fresh_cell(record, runs.index) for record in runs["record"]])


def against(runs: pd.DataFrame, baseline: str) -> pd.DataFrame:
    """Return a row per run of another loss: MEASURES less the baseline's of its seed and setting, as `less` does.

    `measures_of` makes the `runs`.
    """
    keys = {}
    for cell_key, run in runs[runs["loss"] == baseline].iterrows():
        keys[run["setting"], run["seed"]] = cell_key
    places = [(run.setting, run.seed) for run in runs.itertuples()]
    return less(runs, [keys.get(place, "") for place in places])


def beside(runs: pd.DataFrame, left_out: Sequence[str]) -> pd.DataFrame:
    """Return a row per run of `measures_of` with these options: MEASURES less those of the same run without them.

    Raises ValueError if no run has one of the options.
    """
    if runs.empty:
        return runs
    partners = []
    for record in runs["record"]:
        cell = record["cell"]
        kept = {name: value for name, value in cell.items() if name not in left_out}
        partners.append(key(kept) if len(kept) < len(cell) else "")
    if not any(partners):
        raise ValueError(f"--without {' '.join(left_out)}: no run of the grid has such an option")
    return less(runs, partners)


def less(runs: pd.DataFrame, partners: Sequence[str]) -> pd.DataFrame:
    """Return a row per run of `measures_of` that has another run as partner: MEASURES less the partner's, and noise.

    All are compared up to one version, the last that sampled in every run. Only runs with less lag have later ones. The
    rows also have the final accuracies of both runs.
    """
    if runs.empty:
        return runs
    partner = runs.reindex(partners).set_axis(runs.index)
    change = runs[[*MEASURES]] - partner[[*MEASURES]]
    rows = runs[["loss", "setting", "seed", "start", "end"]].join(change)
    rows["own_final"] = runs["final"]
    for name in ("loss", "setting", "final"):
        rows[f"partner_{name}"] = partner[name]
    by_version = runs["rewards"] - partner["rewards"]
    rows["level_noise"] = [
        error_of_mean(rewards.loc[start:])
        for rewards, start in zip(by_version, rows["start"], strict=True)
    ]
    rows["final_noise"] = (runs["final_variance"] + partner["final_variance"]) ** 0.5
    return rows[partner["loss"].notna().to_numpy() & (runs.index != pd.Index(partners))]


def error_of_mean(values: pd.Series) -> float:
    """Return the standard error of the mean by the noise from one version to the next; NaN for fewer than two.

    The variance is half of the mean squared step between neighbours (von Neumann). So a slow trend adds little to it.
    """
    return math.sqrt((values.diff() ** 2).mean() / 2 / max(len(values), 1))


def compare(rows: pd.DataFrame, measure: str = "level") -> pd.DataFrame:
    """Return a row per setting and loss: number of seeds, mean, 95 % t-interval `low` … `high`, p, and a text.

    The mean stays if p, two-sided by Student's t, passes Holm's correction over all rows at 0.05. Then it is bold.
    """
    known = rows.dropna(subset=measure)
    noise = known.get(f"{measure}_noise", pd.Series(0.0, known.index))
    groups = known.assign(noise=noise.fillna(0.0)).groupby(["setting", "loss"], sort=False)
    compared = groups[measure].agg(["count", "mean"]).reset_index()
    compared[["mean", "low", "high", "p"]] = [
        interval(group[measure], group["noise"]) for _, group in groups
    ]
    by_p = compared["p"].sort_values()
    compared["stays"] = (by_p * range(len(by_p), 0, -1)).cummax() <= 0.05
    texts = compared.apply(shown, axis="columns")
    compared["text"] = texts.where(~compared["stays"], "**" + texts + "**")
    return compared


def interval(values: pd.Series, noise: pd.Series) -> tuple[float, float, float, float]:
    """Return the mean, both ends of its 95 % t-interval, and two-sided p. Too few seeds have no ends (NaN) and p = 1.

    Seeds may agree better than the noise within their runs allows. So the spread is the larger of the seeds' standard
    deviation and that noise, a standard error per seed. Coarse accuracies of all seeds can be alike. They prove no
    difference, so p = 1.
    """
    mean, num_seeds = values.mean(), len(values)
    if num_seeds < MIN_SEEDS:
        return mean, math.nan, math.nan, 1.0
    within = math.sqrt((noise**2).mean())
    spread = max(values.std(), within)
    if spread < 1e-12:
        return mean, mean, mean, 1.0
    error = spread / math.sqrt(num_seeds)
    of_seeds = stats.t(num_seeds - 1)
    half = of_seeds.ppf(0.975) * error
    return mean, mean - half, mean + half, 2 * of_seeds.sf(abs(mean) / error)


def shown(row: pd.Series) -> str:
    """Return the mean of differences and its interval, or how few values there are."""
    ends = f"{row['low']:+.3f} … {row['high']:+.3f}"
    if row["count"] < MIN_SEEDS:
        ends = f"n = {row['count']}"
    return f"{row['mean']:+.3f} ({ends})".replace("-", "−")


def compact(compared: pd.DataFrame) -> list[str]:
    """Return the table of `compare`, a row per loss and a column per setting."""
    texts = compared.pivot(index="loss", columns="setting", values="text").fillna(MISSING)
    texts = texts.loc[compared["loss"].unique(), compared["setting"].unique()]
    texts = texts.rename("`{}`".format).reset_index()
    fewest, most = compared["count"].min(), compared["count"].max()
    n = " to ".join(map(str, sorted({fewest, most})))
    caption = f"n = {n} seeds; mean"
    if most >= MIN_SEEDS:
        caption += f" (95 % t-interval), bold after Holm's correction over {len(compared)}"
    if fewest < MIN_SEEDS:
        caption += f". An interval needs {MIN_SEEDS} seeds"
    verdict = [f" {supported(compared)}"] if most >= MIN_SEEDS else []
    return [*markdown(texts, texts.to_numpy()), "", "".join([f"{caption}.", *verdict])]


def supported(compared: pd.DataFrame) -> str:
    """Return which differences of `compare` the seeds support, in words, and larger ones that they do not decide."""
    rows = compared[compared["stays"]]
    if compared["count"].max() < MIN_SEEDS:
        return f"A verdict needs {MIN_SEEDS} seeds."
    if rows.empty:
        return "The seeds support no difference; a wide interval can hide one."
    findings = [
        f"`{row.loss}` is {'better' if row.mean > 0 else 'worse'} at {row.setting}"
        for row in rows.itertuples()
    ]
    verdict = (
        f"The seeds support {len(findings)} of {len(compared)} differences: {'; '.join(findings)}"
    )
    is_open = ~compared["stays"] & (compared["count"] >= MIN_SEEDS)
    larger = compared[is_open & (compared["mean"].abs() > rows["mean"].abs().min())]
    undecided = [
        f"`{row.loss}` at {row.setting} ({f'{row.mean:+.3f}'.replace('-', '−')})"
        for row in larger.itertuples()
    ]
    if undecided:
        verdict += f"; not decided, as their intervals are wider: {'; '.join(undecided)}"
    return f"{verdict}."


def verdicts(rows: pd.DataFrame) -> str:
    """Return the verdict in words on each measure of differences, or the reason why there is no verdict."""
    if rows.empty:
        return "No two runs of a seed can be compared for this."
    texts = []
    for name in MEASURES:
        is_measured = rows[name].notna().any()
        verdict = supported(compare(rows, name)) if is_measured else "It was not measured."
        texts.append(f"{name.capitalize()}: {verdict}")
    return " ".join(filter(None, [*texts, disagreement(rows.dropna(subset="final"))]))


def diverged(runs: pd.DataFrame) -> str:
    """Return a sentence on the runs of `runs_of` that ended early, or an empty text. No difference has them."""
    has_failed = runs["record"].map(lambda record: "error" in record)
    counts = has_failed.groupby([runs["loss"], runs["setting"]], sort=False).agg(["sum", "count"])
    named = [
        f"`{loss_name}` at {setting_name} ({failed} of {count} seeds)"
        for (loss_name, setting_name), failed, count in counts.itertuples()
        if failed
    ]
    if not named:
        return ""
    return f"Not finite, and so in no difference: {'; '.join(named)}. The means are of the seeds that survived."


def final_table(rows: pd.DataFrame, partner: str) -> list[str]:
    """Return the table of each seed's final accuracies, beside `partner`'s, and the sentence `disagreement`."""
    lines = []
    for (setting_name, name), group in rows.groupby(["setting", "loss"], sort=False):
        seeds = group.sort_values("seed")
        finals = [
            " ".join(map("{:.2f}".format, seeds[side])) for side in ("own_final", "partner_final")
        ]
        lines.append([setting_name, f"`{name}`", *finals])
    heading = ["setting", "loss", "final accuracy, each seed", f"{partner}, each seed"]
    sentence = disagreement(rows)
    return ["", *markdown(heading, lines), *(["", sentence] if sentence else [])]


def differences_in_words(rows: pd.DataFrame) -> list[str]:
    """Return a line for each difference of level; none if the table has more than MAX_PRINTED."""
    if rows.empty or rows["level"].isna().all():
        return []
    compared = compare(rows)
    if len(compared) > MAX_PRINTED:
        return []
    return [
        f"  {row.loss}, {_lag_of(row.setting)}: {row.text.strip('*')}{', significant' * row.stays}"
        for row in compared.itertuples()
    ]


def disagreement(rows: pd.DataFrame) -> str:
    """Return a sentence that names each loss and setting whose seeds end far apart, or an empty text."""
    names = ["loss", "setting", "final"]
    own = rows[["loss", "setting", "own_final"]].set_axis(names, axis="columns")
    partner = rows[[f"partner_{name}" for name in names]].set_axis(names, axis="columns")
    finals = pd.concat([own, partner]).groupby(["setting", "loss"], sort=False)["final"]
    ends = finals.agg(["min", "max"]).reset_index()
    named = [
        f"`{row.loss}` at {row.setting} ({row.min:.2f} to {row.max:.2f})"
        for row in ends[ends["max"] - ends["min"] > DISAGREEMENT].itertuples()
    ]
    return f"Seeds disagree: {'; '.join(named)}; look at each." if named else ""


def measure_tables(rows: pd.DataFrame, partner: str) -> list[str]:
    """Return a table for each measure of differences that has values, with what it is, and each seed's accuracy.

    The partner is the name of what is subtracted.
    """
    page = [
        "",
        f"Level needs {MIN_VERSIONS} versions, from half of the steps on, that sampled in all runs. Final accuracy "
        "needs an evaluation of the last weights (`--eval-every`).",
    ]
    for name, text in MEASURES.items():
        if rows[name].notna().any():
            heading = text.format(start=rows["start"].max(), end=rows["end"].max())
            page += ["", f"**{heading}.**", "", *compact(compare(rows, name))]
    with_finals = rows.dropna(subset="final")
    return page if with_finals.empty else [*page, *final_table(with_finals, partner)]


def paired_page(rows: pd.DataFrame) -> list[str]:
    """Return a table for each measure of a grid's `differences`, with its meaning; empty without differences."""
    if rows.empty:
        return []
    return [
        "A loss on stale data less the same loss and seed on fresh data (`async_ratio` and `publish_delay` 0), by the "
        "policy version that sampled. Runs of a seed share first weights, sampling seeds, and the problems of a step. "
        f"{SPREAD} Where a loss has no fresh run, `grpo`'s serves: with one update a step "
        "they have one gradient there. In 16 bits rounding moves ratios from 1, which a narrow clip cuts. So give a "
        "loss its own fresh run there.",
        *measure_tables(rows, "fresh"),
    ]


def against_page(rows: pd.DataFrame, baseline: str) -> list[str]:
    """Return a table for each measure of the rows of `against`; empty if no loss is beside the baseline."""
    if rows.empty:
        return []
    return [
        f"A loss less `{baseline}` with the same seed and setting, so at the same lag. Above zero the loss is better. "
        f"{SPREAD}",
        *measure_tables(rows, f"`{baseline}`"),
    ]


def without_page(rows: pd.DataFrame, left_out: Sequence[str]) -> list[str]:
    """Return a table for each measure of the rows of `beside`; empty if no run has a partner."""
    names = ", ".join(f"`{name}`" for name in left_out)
    if rows.empty:
        return [f"No run has a partner with equal other options and without {names}."]
    return [
        f"A run less the run with the same loss, seed and other options, but without {names}. Above zero the options "
        f"help. {SPREAD} Level is no fair measure of an option that chooses the responses to train on.",
        *measure_tables(rows, "without the options"),
    ]


# Report


def report(out: Path, baseline: str | None = None, left_out: Sequence[str] = ()) -> None:
    """Write the tables and the figure of a grid, print what they say and where everything is.

    The baseline is a loss as in the tables. Unset takes grpo, or the first loss if there is no grpo. With `left_out`
    without.md compares each run that has these options with the same run without them.
    Raises ValueError if no cell is finished, no run has the baseline, or no run has an option of `left_out`.
    """
    records = read_records(out / "cells.jsonl")
    if not records:
        what = f"has no finished cell; scripts/ablate.py --out {out} makes it"
        raise ValueError(f"{out / 'cells.jsonl'} {what}")
    warn_of_other_code([record["code"] for record in records])
    runs = runs_of(records)
    losses = runs["loss"].unique().tolist()
    baseline = baseline or ("grpo" if "grpo" in losses else losses[0])
    if baseline not in losses:
        raise ValueError(
            f"--baseline {baseline} is no loss of {out}; choose one of {', '.join(losses)}"
        )
    csv = runs.drop(columns=["setting", "loss", "record"]).join(summaries(runs).round(5))
    csv.to_csv(out / "cells.csv", index=False)
    measured = measures_of(records)
    rows = {"paired.md": differences(measured), "against.md": against(measured, baseline)}
    if left_out:
        rows["without.md"] = beside(measured, left_out)
    draw(runs, out / "curves.png")
    draw_differences(rows["paired.md"], out / "paired.png")
    note = diverged(runs)
    pages = {
        "paired.md": paired_page(rows["paired.md"]),
        "against.md": against_page(rows["against.md"], baseline),
        "without.md": without_page(rows["without.md"], left_out) if left_out else [],
    }
    tables = {name: [*page, *(["", note] if note and page else [])] for name, page in pages.items()}
    tables["table.md"] = table(runs)
    write_tables(out, tables)
    print("\n".join(tables["table.md"]))
    print(*sorted(path for path in out.iterdir() if path.is_file()), sep="\n")
    for name, differences_of_pairs in rows.items():
        question = QUESTIONS[name].format(baseline=baseline)
        print(f"{name}: {question} {verdicts(differences_of_pairs)}")
        for line in differences_in_words(differences_of_pairs):
            print(line)
    if note:
        print(note)


def write_tables(out: Path, tables: dict[str, list[str]]) -> None:
    """Write the lines of each table to a file of that name. A table without lines has no file."""
    for name, lines in tables.items():
        (out / name).unlink(missing_ok=True)  # of another report, perhaps with another baseline
        if lines:
            (out / name).write_text("\n".join(lines) + "\n", encoding="utf-8")


def draw(runs: pd.DataFrame, path: Path) -> None:
    """Draw training reward by the version that sampled, a panel per setting: seeds without errors, and their mean."""
    sound = runs[runs["record"].map(lambda record: "error" not in record)]
    settings = runs["setting"].unique()
    figure = Figure(figsize=(4 * len(settings) + 4, 4), layout="constrained")
    axes = figure.subplots(1, len(settings), sharex=True, sharey=True, squeeze=False)[0]
    panels = dict(zip(settings, axes, strict=True))
    lines = {}
    for number, name in enumerate(runs["loss"].unique()):
        dashes = DASHES[(number + number // len(COLOURS)) % len(DASHES)]
        style = {"color": COLOURS[number % len(COLOURS)], "ls": dashes}
        for setting_name, group in sound[sound["loss"] == name].groupby("setting", sort=False):
            seeds = [reward_by_version(record) for record in group["record"]]
            for rewards in seeds:
                panels[setting_name].plot(rewards, lw=0.5, alpha=0.5, **style)
            means = pd.concat(seeds).groupby(level=0).mean()
            (lines[name],) = panels[setting_name].plot(means, marker=".", **style)
    for name, panel in panels.items():
        panel.set(title=_lag_of(name), xlabel="policy version")
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        panel.grid(alpha=0.3)
    axes[0].set_ylabel("training reward")
    figure.legend(lines.values(), lines, loc="outside right upper")
    figure.savefig(path, dpi=100)


def _lag_of(setting_name: str) -> str:
    """Return the name of a setting for a figure: lag K for α = 0 and publish delay K."""
    text = setting_name.replace("`", "")
    return re.sub(r"async_ratio 0, publish_delay (\d+)", r"lag \1", text)


def draw_differences(rows: pd.DataFrame, path: Path) -> None:
    """Draw differences of level by loss and setting: a dot per seed, their mean and 95 % t-interval.

    Without differences a figure of another report is deleted.
    """
    path.unlink(missing_ok=True)
    if rows.empty or rows["level"].isna().all():
        return
    compared = compare(rows)
    places = {name: place for place, name in enumerate(compared["loss"].unique())}
    settings = compared["setting"].unique()
    figure = Figure(figsize=(8, 1.5 + 0.18 * len(compared)), layout="constrained")
    axes = figure.subplots()
    axes.set_ylim(len(places) - 0.4, -0.6)
    for number, name in enumerate(settings):
        shift = (number + 1) / (len(settings) + 1) - 0.5
        style = {"color": COLOURS[number], "label": _lag_of(name)}
        means = compared[compared["setting"] == name]
        heights = means["loss"].map(places) + shift
        ends = [means["mean"] - means["low"], means["high"] - means["mean"]]
        axes.errorbar(means["mean"], heights, xerr=ends, fmt="|", capsize=3, **style)
        seeds = rows[rows["setting"] == name]
        axes.scatter(seeds["level"], seeds["loss"].map(places) + shift, s=12, color=COLOURS[number])
    axes.set_yticks([*places.values()], [*places])
    axes.axvline(0, color="grey", lw=0.8)
    few = "" if compared["count"].max() >= MIN_SEEDS else f", which needs {MIN_SEEDS} seeds"
    axes.set_xlabel(
        f"← lag hurts.  Level, lagged minus fresh: each seed, mean, 95 % t-interval{few}"
    )
    figure.legend(loc="outside upper center", ncols=2)
    figure.savefig(path, dpi=100)
