"""Trained responses beside all drawn ones: `python -m scripts.bench.bias RUNS`, after the runs of results/bias/plan.md.

It reads the events of each run in the folder RUNS, and writes records and a table in results/bias. A group counts if
its fate is known: its id is below the last trained one by twice the outstanding groups. Of a trained group the first
group_size finished responses are trained. All other responses with a token are lost.

The length of an aborted response is known only so far. So drawn lengths are estimated as lifetimes of which some are
cut (Kaplan and Meier 1958): S(n) is the product over lengths m < n of 1 − ended(m)/reached(m). This is right if an
abort does not depend on the tokens that would have followed.
"""

import hashlib
import json
import statistics
from collections import defaultdict
from pathlib import Path

import tyro

from asyncrl.config import OPTIONS, Config
from asyncrl.runlog.header import git
from scripts.lines import ROOT, markdown, read, run_command
from scripts.runs import Run, load

OUT = ROOT / "results" / "bias"
LONG_SHARE = 0.25
"""Largest share of drawn responses that count as long."""
HARD_BELOW = 0.5
"""Mean reward of a group below which it counts as hard."""
COLUMNS = {
    "lost": "lost responses, share",
    "length": "mean tokens, trained",
    "length_bias": "trained − drawn, tokens",
    "length_metric": "the same by `bias/*`",
    "long": "long responses, trained / drawn",
    "reward_bias": "reward, trained − drawn",
    "hard": "hard groups, trained / drawn",
    "wait": "trainer waits, share of time",
}


def record_of(run: Run) -> dict:
    """Return what is kept of a run."""
    config = Config.from_dict({n: v for n, v in run.info["config"].items() if n in OPTIONS})
    groups, trained_groups = _closed_groups(run, config)
    trained, lost = [], []
    for group_id, responses in groups.items():
        finished = [t for t in responses if t["finish_reason"] in ("stop", "length")]
        taken = finished[: config.group_size] if group_id in trained_groups else []
        trained += taken
        lost += [t for t in responses if t not in taken and t["tokens"]]
    drawn = [*trained, *lost]
    survival = survival_of([(t["tokens"], t["finish_reason"] != "aborted") for t in drawn])
    long_from = next(n for n, share in enumerate(survival) if share <= LONG_SHARE)
    length = statistics.fmean(t["tokens"] for t in trained)
    long_share = statistics.fmean(t["tokens"] >= long_from for t in trained)
    means = {
        group_id: statistics.fmean(rewards)
        for group_id, responses in groups.items()
        if (rewards := [t["reward"] for t in responses if t["finish_reason"] in ("stop", "length")])
    }
    last, settled = run.metrics.iloc[-1], run.metrics.iloc[len(run.metrics) // 4 :]
    return {
        "command": " ".join(["python", *run.info["command"][1:]]),
        "commit": run.info["git_commit"][:12],
        "dirty": bool(run.info["git_diff"]),
        "hardware": f"{run.info['hardware']['cpu_cores']} CPU cores, {run.info['hardware']['cpu']}",
        "stale_policy": config.stale_policy,
        "extra_members": config.extra_members,
        "extra_groups": config.extra_groups,
        "seed": config.seed,
        "steps": len(run.metrics),
        "responses": len(drawn),
        "long_from": long_from,
        "numbers": {
            "lost": len(lost) / len(drawn),
            "length": length,
            "length_bias": length - sum(survival[1:]),
            "length_metric": float(last["bias/length_trained_minus_drawn"]),
            "long": long_share / survival[long_from],
            "reward_bias": float(last["bias/reward_trained_minus_drawn"]),
            "hard": _share_of_hard(means, trained_groups) / _share_of_hard(means, means),
            "wait": float(settled["time/wait_s"].sum() / settled["time/step_s"].sum()),
        },
    }


def _closed_groups(run: Run, config: Config) -> tuple[dict[int, list[dict]], set[int]]:
    """Return the responses of each group whose fate is known, in their order, and the ids of trained groups."""
    groups, trained = defaultdict(list), set()
    for record in run.records:
        if record["event"] == "step":
            trained.update(record["groups"])
        elif record["event"] == "trajectory" and record["group"] >= 0:
            groups[record["group"]].append(record)
    end = max(trained) - 2 * config.max_outstanding_groups
    return {i: responses for i, responses in groups.items() if i <= end}, trained


def survival_of(lengths: list[tuple[int, bool]]) -> list[float]:
    """Return S(n) for n = 0 … longest: the share of responses with at least n tokens.

    `lengths` has tokens, and whether the response ended there; otherwise it was aborted. The sum of S(n) over n ≥ 1 is
    the mean length.
    """
    survival = [1.0]
    for n in range(max(length for length, _ in lengths)):
        reached = sum(length > n or (length == n and ended) for length, ended in lengths)
        num_ended = sum(length == n and ended for length, ended in lengths)
        survival.append(survival[-1] * (1 - num_ended / reached if reached else 0.0))
    return survival


def _share_of_hard(means: dict[int, float], chosen) -> float:
    return statistics.fmean(mean < HARD_BELOW for i, mean in means.items() if i in chosen)


def write_table(records: list[dict]) -> None:
    """Write short.md: means over seeds with lowest and highest."""
    settings = defaultdict(list)
    for record in records:
        extra = "".join(
            f", `--extra-{kind} {record[f'extra_{kind}']}`"
            for kind in ("members", "groups")
            if record[f"extra_{kind}"]
        )
        settings[f"`{record['stale_policy']}`{extra}"].append(record["numbers"])
    rows = [
        [name, *(_shown([n[column] for n in numbers]) for column in COLUMNS), len(numbers)]
        for name, numbers in settings.items()
    ]
    write_short(OUT / "bias.jsonl", markdown(["setting", *COLUMNS.values(), "n"], rows), __file__)


def write_short(records: Path, table: list[str], script: str) -> None:
    """Write short.md beside records: a table, and what made it."""
    body = "\n".join(table) + "\n"
    digests = [
        hashlib.sha256(data).hexdigest()[:16] for data in (records.read_bytes(), body.encode())
    ]
    made_by = (
        f"scripts/bench/{Path(script).name} of commit {git('rev-parse', '--short=12', 'HEAD')}"
    )
    head = f"<!-- Made by {made_by} from {records.name}, sha256 {digests[0]}…, page sha256 {digests[1]}…. -->\n"
    records.with_name("short.md").write_text(head + body, encoding="utf-8")


def _shown(values: list[float]) -> str:
    texts = [
        f"{round(value, 3) + 0.0:.3f}".replace("-", "−")
        for value in (statistics.fmean(values), min(values), max(values))
    ]
    mean, low, high = texts
    return mean if low == high else f"{mean} ({low} … {high})"


def main(runs: tyro.conf.Positional[Path]) -> None:
    """Write records and table of all runs of a folder.

    Args:
        runs: Folder of run directories.
    """
    records = [record_of(load(path.parent)) for path in sorted(runs.glob("*/metrics.jsonl"))]
    text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    (OUT / "bias.jsonl").write_text(text, encoding="utf-8")
    write_table(read(OUT / "bias.jsonl"))
    print((OUT / "short.md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    run_command(main)
