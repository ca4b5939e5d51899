"""Tables, pairs and figures of grids: random cells against scipy and plain loops, and stored tables made again."""

import math
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.collections import PathCollection
from matplotlib.image import imread
from scipy import stats
from user_files import write_jsonl

from scripts import grids
from scripts.runs import SUMMARY

RNG = np.random.default_rng(0)


def make_record(algo="grpo", delay=0, seed=0, *, ratio=0.0, steps=40, error=None, **options):
    """A run with random rewards and numbers. Its last weights are always evaluated."""
    cell = {"algo": algo, "async_ratio": ratio, "publish_delay": delay, "seed": seed} | options
    series = {
        "reward": RNG.uniform(size=steps).tolist(),
        "staleness_mean": [min(step, delay) + ratio for step in range(steps)],
    }
    evaluations = [[0, 0.25], [0, 0.3], [steps // 2, 1.0], [steps, RNG.uniform()]]
    summary = dict.fromkeys([*SUMMARY, *grids.LATE_COLUMNS])
    summary |= {"steps": steps, "samples": 8 * steps, "staleness_max": delay + 2}
    summary |= {"reward_first": seed / 64, "reward_last": 0.5, "accuracy_last": (delay + seed) / 32}
    summary |= {"staleness_mean": 0.9 * delay, "seconds_per_step": 2.0, "drift/k3": 4.6875 + seed}
    kept = {"series": series, "evaluations": evaluations, "summary": summary}
    return {"cell": cell, "options": [], "code": None} | kept | ({"error": error} if error else {})


@pytest.mark.parametrize(("steps", "lag"), [(40, 15), (40, 16), (41, 16), (80, 4), (9, 0), (8, 0)])
def test_the_versions_of_level_are_known_before_the_runs(steps, lag):
    measured = grids.measures_of([make_record(delay=lag, steps=steps), make_record(steps=steps)])
    num_versions = measured["end"].iloc[0] - measured["start"].iloc[0] + 1
    assert grids.num_level_versions(steps, lag) == num_versions
    assert measured["level"].notna().all() == (num_versions >= grids.MIN_VERSIONS)


def test_grpos_fresh_run_serves_a_loss_without_one_where_both_have_one_gradient():
    fresh, stale = make_record(), make_record("m2po", 4)
    assert len(differences_of([fresh, stale])) == 1
    assert grids.paired_page(differences_of([make_record("tis"), stale])) == []
    broken = make_record("m2po", 4, error="it broke")
    several = [make_record("grpo", minibatches=4), make_record("m2po", 4, minibatches=4)]
    for records in ([fresh, broken], [fresh, make_record("my_loss.py:loss", 4)], several):
        assert differences_of(records).empty
    assert differences_of([broken]).empty


@pytest.mark.parametrize(
    ("of_record", "options", "has_one"),
    [
        ({"updates_per_step": 1, "options": ["--config", "run.toml"]}, {}, True),
        ({"updates_per_step": 1}, {"minibatches": 1}, True),
        ({"updates_per_step": 2, "options": ["--config", "run.toml"]}, {}, False),
        ({"updates_per_step": 2}, {}, False),
        # Older code kept only the words.
        ({"options": ["--steps", "40"]}, {"lr": 0.1}, True),
        ({"options": ["--optim.epochs", "2"]}, {}, False),
        ({"options": ["--optim.epochs=2"]}, {}, False),
        ({"options": ["--minibatches=4"]}, {}, False),
        ({"options": ["--config", "run.toml"]}, {}, False),
        ({"options": ["--config=run.toml"]}, {}, False),
        ({"options": ["--like", "runs/one"]}, {}, False),
        ({}, {"optim.epochs": 2}, False),
        ({}, {"minibatches": 4}, False),
    ],
)
def test_grpos_fresh_run_serves_no_run_with_several_updates_a_step(of_record, options, has_one):
    pair = make_record("grpo", **options), make_record("m2po", 4, **options)
    assert len(differences_of([record | of_record for record in pair])) == has_one


def differences_of(records):
    return grids.differences(grids.measures_of(records))


def test_runs_with_an_option_are_compared_with_those_without_by_plain_loops():
    records = [
        make_record(delay=delay, seed=seed, **options)
        for options in ({}, {"centering": True, "top_logprobs": 8}, {"lr": 0.1})
        for delay in (0, 4)
        for seed in range(3)
    ]
    measured = grids.measures_of(records)
    rows = grids.beside(measured, ["centering", "top_logprobs"])
    assert len(rows) == 6
    for record, partner in zip(records[6:12], records[:6], strict=True):
        row, own, other = (
            rows.loc[grids.key(record["cell"])],
            measured.loc[grids.key(record["cell"])],
            measured.loc[grids.key(partner["cell"])],
        )
        assert row["final"] == own["final"] - other["final"]
        assert row["level"] == own["level"] - other["level"]
    page = "\n".join(grids.without_page(rows, ["centering", "top_logprobs"]))
    assert "without `centering`, `top_logprobs`" in page and page.count("| `grpo` |") == 4
    text = "{:.2f} {:.2f} {:.2f}".format
    finals = [record["evaluations"][-1][1] for record in records[:12]]
    for start, setting in ((0, 0), (3, 4)):
        pair = f"{text(*finals[start + 6 : start + 9])} | {text(*finals[start : start + 3])} |"
        assert (
            f"`publish_delay` {setting}, `centering` true, `top_logprobs` 8 | `grpo` | {pair}"
            in page
        )
    with pytest.raises(ValueError, match="--without top_p: no run of the grid has"):
        grids.beside(measured, ["top_p"])


def test_a_loss_is_compared_with_the_baseline_of_its_seed_and_setting_by_plain_loops():
    losses = {"grpo": {}, "tis": {}, "mine.py:loss": {"algo_args": ["narrow=1"]}}
    records = [
        make_record(algo, delay, seed, **options)
        for algo, options in losses.items()
        for delay in (0, 4)
        for seed in range(3)
    ]
    records[-1]["error"] = "it broke"
    measured = grids.measures_of(records)
    rows = grids.against(measured, "tis")
    assert len(rows) == 11 and "tis" not in {*rows["loss"]}
    levels = {}
    for record in records[:-1]:
        cell, rewards = record["cell"], record["series"]["reward"]
        lag = cell["publish_delay"]
        by_version = [np.mean(rewards[: lag + 1]), *rewards[lag + 1 :]]
        levels[cell["algo"], lag, cell["seed"]] = np.mean(by_version[20:36])
    for cell_key, row in rows.iterrows():
        cell = next(r["cell"] for r in records if grids.key(r["cell"]) == cell_key)
        place = cell["publish_delay"], cell["seed"]
        difference = levels[cell["algo"], *place] - levels["tis", *place]
        assert row["level"] == pytest.approx(difference)
    page = "\n".join(grids.against_page(rows, "tis"))
    assert "versions 20 to 35" in page and "| `mine.py:loss:narrow=1` |" in page


def expected_interval(values, noise):
    """Mean, ends and p of Student's t, of the seeds' spread or the noise within their runs if that is larger."""
    if len(values) < 3:
        return values.mean(), math.nan, math.nan, 1.0
    spread = max(values.std(ddof=1), np.sqrt((noise**2).mean()))
    if np.ptp(values) == noise.max() == 0:
        return values.mean(), values.mean(), values.mean(), 1.0
    law = stats.t(len(values) - 1, values.mean(), spread / math.sqrt(len(values)))
    return values.mean(), *law.interval(0.95), 2 * min(law.cdf(0), law.sf(0))


def test_intervals_and_p_are_students_and_holms_correction_is_that_of_its_definition():
    rng = np.random.default_rng(2)
    seeds = {f"loss {i}": rng.normal(i / 4, 1.0, 1 + i % 6) for i in range(36)} | {
        "alike": np.full(3, -1 / 3)
    }
    noise = {name: rng.choice([0, 0, 1]) * rng.uniform(0, 3, len(seeds[name])) for name in seeds}
    noise["alike"] *= 0
    rows = [
        {"setting": "s", "loss": name, "level": value, "level_noise": error}
        for name in seeds
        for value, error in [*zip(seeds[name], noise[name], strict=True), (math.nan, 0.0)]
    ]
    compared = grids.compare(pd.DataFrame(rows)).set_index("loss")
    expected = {name: expected_interval(seeds[name], noise[name]) for name in seeds}
    # Holm: from the least p on, the i-th of m stays while p ≤ 0.05 / (m − i).
    holds = True
    for i, name in enumerate(sorted(seeds, key=lambda name: expected[name][3])):
        row, (mean, low, high, p) = compared.loc[name], expected[name]
        found = row[["mean", "low", "high", "p"]].tolist()
        assert found == pytest.approx([mean, low, high, p], nan_ok=True), name
        holds = holds and p <= 0.05 / (len(seeds) - i)
        ends = f"n = {len(seeds[name])}" if p == 1 and low != high else f"{low:+.3f} … {high:+.3f}"
        text = f"{mean:+.3f} ({ends})".replace("-", "−")
        assert (row["stays"], row["text"]) == (holds, f"**{text}**" if holds else text)
    by_bonferroni = (compared["p"] <= 0.05 / len(seeds)).sum()
    assert 0 < by_bonferroni < compared["stays"].sum() < len(seeds)
    caption = grids.compact(compared.reset_index())[-1]
    assert caption.startswith("n = 1 to 6 seeds; mean (95 %") and "needs 3 seeds" in caption
    supported = compared.index[compared["stays"]]
    assert f"support {len(supported)} of {len(seeds)} differences: " in caption
    for name in seeds:
        sign = "better" if compared.loc[name, "mean"] > 0 else "worse"
        assert (f"`{name}` is {sign} at s" in caption) == (name in supported)
    few = compared.reset_index().assign(stays=False)
    assert grids.compact(few)[-1].endswith(
        "The seeds support no difference; a wide interval can hide one."
    )
    error = grids.error_of_mean(pd.Series(rng.normal(0.5, 0.06, 4000)))
    assert error == pytest.approx(0.06 / math.sqrt(4000), rel=0.1)


def test_seeds_that_disagree_are_shown_and_named_and_so_is_a_larger_loss_that_they_do_not_decide():
    """`tis` loses more than `grpo`, but its seeds spread. `topr` loses less than both."""
    finals = {
        ("grpo", 0): (0.9, 0.9, 0.9),
        ("grpo", 8): (0.8, 0.81, 0.82),
        ("tis", 8): (0.0, 0.85, 0.1),
        ("topr", 8): (0.9, 0.85, 0.9),
    }
    records = []
    for (algo, delay), accuracies in finals.items():
        for seed in (2, 0, 1):
            record = make_record(algo, delay, seed)
            record["series"]["reward"] = [0.5] * 40
            records.append(record | {"evaluations": [[40, accuracies[seed]]]})
    measured = grids.measures_of(records)
    place = "`async_ratio` 0, `publish_delay` 8"
    sentence = f"Seeds disagree: `tis` at {place} (0.00 to 0.85); look at each."
    verdict = (
        f"The seeds support 1 of 3 differences: `grpo` is worse at {place}; "
        f"not decided, as their intervals are wider: `tis` at {place} (−0.583)."
    )
    rows = grids.differences(measured)
    assert grids.verdicts(rows).endswith(f"Final: {verdict} {sentence}")
    page = grids.paired_page(rows)
    assert page[-1] == sentence and verdict in "\n".join(page)
    assert f"| {place} | `tis` | 0.00 0.85 0.10 | 0.90 0.90 0.90 |" in page
    page = grids.against_page(grids.against(measured, "tis"), "tis")
    assert page[-1] == sentence
    assert f"| {place} | `grpo` | 0.80 0.81 0.82 | 0.00 0.85 0.10 |" in page
    steady = rows[rows["loss"] != "tis"]
    assert "Seeds disagree" not in "\n".join(grids.paired_page(steady)) + grids.verdicts(steady)


# Records, figures, report


def test_a_cell_that_was_written_twice_counts_once_and_a_broken_line_is_named(tmp_path):
    records = [make_record(), make_record()]
    path = write_jsonl(tmp_path / "cells.jsonl", records)
    assert grids.read_records(path) == records[1:]
    path.write_text(path.read_text() + '{"cell": {}, "options": []}\n')
    with pytest.raises(ValueError, match=r"line 3 is not a cell with its series; delete the line"):
        grids.read_records(path)


def test_a_report_writes_the_tables_the_csv_and_a_figure_that_shows_something(tmp_path, capsys):
    records = []
    for seed in range(2):
        for algo, delay in (("tis", 4), ("tis", 16), ("grpo", 0), ("grpo", 4)):
            error = "a\nb" if (algo, delay, seed) == ("grpo", 4, 1) else None
            record = make_record(algo, delay, seed, error=error)
            record["series"]["reward"] = [(step + seed) / 64 for step in range(40)]
            records.append(record | {"evaluations": [[0, 0.25], [40, (delay + seed) / 32]]})
    write_jsonl(tmp_path / "cells.jsonl", records)
    grids.report(tmp_path, "tis")
    golden = Path(__file__).with_name("grids.txt").read_text()
    names = ("table.md", "cells.csv", "paired.md", "against.md")
    assert "\n".join((tmp_path / name).read_text() for name in names) == golden
    printed = capsys.readouterr().out
    assert (tmp_path / "table.md").read_text() in printed
    assert str(tmp_path / "curves.png") in printed
    assert printed.endswith(
        "paired.md: what do stale data cost each loss? Lagged less fresh. "
        "Level: It was not measured. Final: A verdict needs 3 seeds.\n"
        "against.md: is a loss better than tis at the same lag? "
        "Level: It was not measured. Final: A verdict needs 3 seeds.\n"
        "Not finite, and so in no difference: `grpo` at `async_ratio` 0, `publish_delay` 4 (1 of 2 seeds). "
        "The means are of the seeds that survived.\n"
    )
    pixels = imread(tmp_path / "curves.png")
    assert pixels.shape[1] >= 800 and 0.01 < (pixels[..., :3].min(axis=2) < 0.9).mean() < 0.5
    assert not (tmp_path / "paired.png").exists()  # no level was measured
    with pytest.raises(ValueError, match=r"--baseline ppo is no loss of .* one of grpo, tis$"):
        grids.report(tmp_path, "ppo")


@pytest.mark.parametrize("part", ["smollm2", "others"])
def test_the_published_study_is_what_a_report_of_its_records_says(
    part, tmp_path, monkeypatch, capsys
):
    study = Path(grids.__file__).parents[1] / "results/study"
    monkeypatch.setattr(grids, "draw", lambda *_: None)
    (tmp_path / "cells.jsonl").write_bytes((study / part / "cells.jsonl").read_bytes())
    grids.report(tmp_path)
    paired = (tmp_path / "paired.md").read_text()
    published = (study / "tables.md").read_text()
    for heading in ("**Level: ", "**Final: "):
        table = paired.partition(heading)[2].partition("\nn = ")[0].splitlines()
        rows = [line for line in table if line.startswith("| `")]
        assert len(rows) >= 5
        assert all(row in published for row in rows[1:])
    printed = capsys.readouterr().out.splitlines()
    line, against_line = (
        line for line in printed if line.startswith(("paired", "against")) and ": " in line
    )
    found = re.findall(r"The seeds support .+?[.](?= |$)", line)
    assert found == re.findall(r"The seeds support .+?[.]$", paired, re.M) and len(found) == 2
    is_compared = (tmp_path / "against.md").exists()
    assert ("No two runs of a seed can be compared" in against_line) == (not is_compared)


GRIDS = {
    "two seeds, no evaluation, few steps": [
        make_record(a, k, s, steps=8) | {"evaluations": []} for a in ("grpo", "tis") for k in (0, 4) for s in (0, 1)
    ],
    "one loss": [make_record("tis", 0, seed) for seed in range(3)],
    "all failed": [make_record(error="it broke")],
    "a loss without fresh runs": [
        make_record(a, k, s) for a, k in (("grpo", 0), ("grpo", 4), ("my.py:f", 4)) for s in range(3)
    ],
    "runs of unequal length": [make_record(steps=steps, seed=steps) for steps in (9, 40, 31)],
}  # fmt: skip


@pytest.mark.parametrize("name", GRIDS)
def test_a_grid_without_some_pairs_or_measures_has_the_pages_of_the_others(name, tmp_path, capsys):
    records = GRIDS[name]
    write_jsonl(tmp_path / "cells.jsonl", records)
    grids.report(tmp_path)
    printed = capsys.readouterr().out
    assert ("Of 1 runs 1 failed" in printed) == (name == "all failed")
    assert "reward, first tenth" in printed and (tmp_path / "curves.png").exists()
    pages = {path.name: path.read_text() for path in tmp_path.glob("*.md")}
    some_pairs = name in ("two seeds, no evaluation, few steps", "a loss without fresh runs")
    assert ("paired.md" in pages) == ("against.md" in pages) == some_pairs
    for page in ("paired.md", "against.md") if some_pairs else ():
        measured = "my.py:f" in {record["cell"]["algo"] for record in records}
        assert ("**Level: " in pages[page]) == ("**Final: " in pages[page]) == measured
        assert "Level needs 5 versions" in pages[page]
        assert ("my.py:f" in pages[page]) == (measured and page == "against.md")


@pytest.fixture
def figures(monkeypatch):
    """The figures that were saved."""
    saved = []

    class Kept(grids.Figure):
        def savefig(self, *args, **options):
            saved.append(self)
            super().savefig(*args, **options)

    monkeypatch.setattr(grids, "Figure", Kept)
    return saved


def test_the_figure_of_differences_has_a_dot_for_each_seed_of_a_loss(figures, tmp_path):
    records = [
        make_record(a, k, s, steps=80)
        for a in ("grpo", "tis")
        for k in (0, 4, 16)
        for s in range(3)
    ]
    rows = grids.differences(grids.measures_of(records))
    grids.draw_differences(rows, tmp_path / "paired.png")
    (panel,), (legend,) = figures[0].axes, figures[0].legends
    labels = [label.get_text() for label in panel.get_yticklabels()]
    dots = [
        (labels[round(y)], x)
        for part in panel.collections
        if isinstance(part, PathCollection)
        for x, y in part.get_offsets().tolist()
    ]
    assert sorted(dots) == sorted(zip(rows["loss"], rows["level"], strict=True)) and len(dots) == 12
    assert [text.get_text() for text in legend.get_texts()] == ["lag 4", "lag 16"]


def test_few_differences_are_printed_and_many_are_not():
    records = [
        make_record(a, k, s, steps=80) for a in ("grpo", "tis") for k in (0, 4) for s in range(3)
    ]
    rows = grids.differences(grids.measures_of(records))
    lines = grids.differences_in_words(rows)
    assert [line.partition(": ")[0] for line in lines] == ["  grpo, lag 4", "  tis, lag 4"]
    assert all(re.search(r": [+−]\d\.\d{3} \(.+ … .+\)(, significant)?$", line) for line in lines)
    others = [rows.assign(loss=f"loss{number}") for number in range(grids.MAX_PRINTED + 1)]
    assert grids.differences_in_words(pd.concat(others)) == []


def test_thirty_losses_have_lines_that_differ_and_a_legend_outside_of_the_panels(figures, tmp_path):
    records = [make_record(f"loss{number}.py:f") for number in range(30)]
    grids.draw(grids.runs_of(records), tmp_path / "curves.png")
    (panel,), (legend,) = figures[0].axes, figures[0].legends
    means = [line for line in panel.lines if line.get_marker() == "."]
    lines = [(line.get_color(), line.get_linestyle()) for line in means]
    assert len({*lines}) == len(legend.get_texts()) == 30
    assert len({color for color, _ in lines[:20]}) == 20
    assert legend.get_window_extent().x0 >= panel.get_window_extent().x1


def test_losses_of_two_files_of_one_name_are_two_losses():
    records = [make_record(f"/{folder}/my.py:f", seed=seed) for folder in "ab" for seed in (0, 1)]
    records += [make_record("/a/my.py:f", algo_args=["cap=1"])]
    names = ["/a/my.py:f"] * 2 + ["/b/my.py:f"] * 2
    assert sorted(grids.runs_of(records)["loss"]) == [*names, "my.py:f:cap=1"]
    records += [make_record("/b/my.py:f", algo_args=["cap=1"], error="it broke")]
    with_options = ["/a/my.py:f:cap=1", "/b/my.py:f:cap=1"]
    assert sorted(grids.runs_of(records)["loss"]) == sorted([*names, *with_options])
    # A run that failed is in no difference, but tells the names apart.
    assert "/a/my.py:f:cap=1" in [*grids.measures_of(records)["loss"]]


def test_another_order_of_the_options_is_no_other_setting():
    swept = {"lr": 0.1, "dtype": "bfloat16"}
    other_order = dict(reversed(swept.items()))
    records = [make_record("grpo", 4, **swept), make_record("tis", 4, **other_order)]
    runs = grids.runs_of(records)
    text = "`async_ratio` 0, `publish_delay` 4, `lr` 0.1, `dtype` bfloat16"
    assert [*runs["setting"]] == [text, text]
    assert len(grids.against(grids.measures_of(records), "grpo")) == 1
