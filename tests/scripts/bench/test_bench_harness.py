"""The harness: turns, records, tables. Every bench once, tiny, and its stored page from its stored records."""

import json
import random
import subprocess
import sys
from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest

from scripts.bench import harness, rollout, trees
from scripts.bench.harness import Bench, Case, Column
from scripts.lines import read

MADE = {
    "size": "full", "command": "python bench", "commit": "c0ffee", "dirty": False, "changes": "",
    "hardware": "2 CPU cores", "load_before": 0.1, "packages": {"torch": "2"},
}  # fmt: skip


class Race:
    """A bench of two arms that write down what is done with them; each measures 1, 2, … seconds."""

    def __init__(self, tmp_path, **case):
        self.log, self.path, self.dying = [], tmp_path / "race.jsonl", ""
        arms = {arm: partial(self.start, arm) for arm in "ab"}
        self.case = Case("race on foot", arms, **case)
        key = ("case", "arm")
        self.bench = Bench("race", "A race", lambda given: [self.case], lambda records: [], key)

    @contextmanager
    def start(self, arm, logs):
        self.log.append(f"start {arm}")
        (logs / arm).touch()
        yield partial(self.measure, arm)
        self.log.append(f"end {arm}")

    def measure(self, arm):
        self.log.append(arm)
        if arm == self.dying:
            raise RuntimeError("died")
        return {"seconds": float(self.log.count(arm))}

    def run(self, repeats, made=MADE):
        """What is done, and what is then on record."""
        self.log.clear()
        harness.measure(self.bench, self.case, repeats, self.path, made)
        return self.log, [(r.get("arm"), r["repeat"], r["seconds"]) for r in read(self.path)]


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    """Logs that are kept after a failure go with the test."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def test_arms_take_turns_every_second_round_backwards_and_the_first_round_is_dropped(tmp_path):
    log, records = Race(tmp_path).run(2)
    assert log[:8] == ["start a", "start b", "a", "b", "a", "b", "b", "a"]
    assert sorted(log[8:]) == ["end a", "end b"]
    assert records == [("a", 0, 2.0), ("b", 0, 2.0), ("b", 1, 3.0), ("a", 1, 3.0)]
    assert not list(tmp_path.glob("bench-*")), "logs are kept after a failure only"


def test_a_bench_resumes_where_it_stopped_and_what_other_makers_measured_is_replaced(tmp_path):
    race = Race(tmp_path, warm_up=0)
    race.dying = "b"
    with pytest.raises(RuntimeError, match="died"):
        race.run(2)
    assert "end a" in race.log and len(list(tmp_path.glob("bench-*/*"))) == 2
    race.dying = ""
    log, records = race.run(2)
    assert log[2:5] == ["b", "b", "a"] and len(records) == 4
    assert race.run(2) == ([], records), "all is done"
    failed = {"failed": "it fell", **MADE, "case": "race on foot", "arm": "a", "repeat": 2}
    race.path.write_text(race.path.read_text() + json.dumps(failed | {"seconds": 9.0}) + "\n")
    log, records = race.run(3)
    assert (
        log[2:4] == ["a", "b"]
        and len(records) == 6
        and records[-2:] == [("a", 2, 1.0), ("b", 2, 1.0)]
    )
    _, records = race.run(1, MADE | {"commit": "another"})
    assert records == [("a", 0, 1.0), ("b", 0, 1.0)]


def test_cells_are_medians_and_extremes_of_a_row_and_of_its_ratios_to_the_first():
    rng = random.Random(0)
    rows = {row: [{"s": rng.uniform(1, 9)} for _ in range(5)] for row in ("slow", "fast")}
    rows["fast"].append({"s": None})
    column = Column("s", "ms", ".0f", 1000, better=-1, against="times faster")
    lines = harness.table("arm", rows, [column, Column("other", "nothing")])
    assert lines[0] == "| arm | n | ms | times faster | nothing |"
    first, last = (np.array([r["s"] for r in records[:5]]) for records in rows.values())
    low, median, high = np.percentile(last, [0, 50, 100]) * 1000
    gains, gain = first / last, np.median(first) / np.median(last)
    shown = f"{median:.0f} [{low:.0f}–{high:.0f}], n = 5 | {gain:.2f} [{gains.min():.2f}–{gains.max():.2f}]"
    assert lines[3] == f"| fast | 6 | {shown} | – |"


def run_main(race, monkeypatch, *options):
    monkeypatch.setattr("sys.argv", ["race.py", *map(str, options)])
    return harness.main(race.bench)


def test_the_page_names_what_made_the_records(tmp_path, monkeypatch):
    options = ("--repeats", 1, "--only", "race", "--size", "tiny", "--out", tmp_path)
    records = run_main(Race(tmp_path), monkeypatch, *options)
    text = (tmp_path / "table.md").read_text()
    assert f"commit {records[0]['commit']}" in text and "--repeats 1" in text and "tiny" in text


@pytest.mark.parametrize(
    ("options", "memory", "reason"),
    [
        (["--only", "nothing"], 0, "--only 'nothing' is none of"),
        (["--repeats", "0"], 0, "at least 1"),
        (["--report"], 0, "no records"),
        (["--size", "tiny"], 1e15, "needs 1000000 GB"),
    ],
)
def test_what_cannot_be_done_is_refused(tmp_path, monkeypatch, capsys, options, memory, reason):
    race = Race(tmp_path, memory=memory)
    with pytest.raises(SystemExit, match="2"):
        run_main(race, monkeypatch, "--out", tmp_path, *options)
    assert not race.log and reason in capsys.readouterr().err


def test_uncommitted_changes_make_no_records_in_results(tmp_path):
    dirty, results = {**MADE, "dirty": True}, harness.ROOT / "results" / "race"
    for out, made in ((tmp_path, dirty), (results, MADE)):
        harness.check([Race(tmp_path).case], out, made)
    with pytest.raises(ValueError, match="uncommitted"):
        harness.check([Race(tmp_path).case], results, dirty)
    assert "with changes" in harness.made_by([dirty])[0]


# The benches


@pytest.mark.parametrize("bench", [rollout.BENCH, trees.BENCH])
def test_the_stored_records_give_the_stored_page(bench, tmp_path):
    stored = harness.ROOT / "results" / bench.name
    (tmp_path / f"{bench.name}.jsonl").symlink_to(stored / f"{bench.name}.jsonl")
    harness.write(bench, tmp_path)
    assert (tmp_path / "table.md").read_text() == (stored / "table.md").read_text()


def run_tiny(script, out, *options):
    command = [sys.executable, f"scripts/bench/{script}.py", "--size", "tiny", "--out", out]
    done = subprocess.run(
        [*command, *options], cwd=harness.ROOT, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "the numbers mean nothing" in (out / "table.md").read_text()
    return read(out / f"{script}.jsonl")


@pytest.mark.study
def test_one_request_and_replicated_prompts_sample_the_same_tokens_on_real_engines(tmp_path):
    records = run_tiny("rollout", tmp_path, "--only", "replication 8x8", "--repeats", "2")
    for measured in harness.rounds(records, "repeat").values():
        assert {r["arm"] for r in measured} == {"one request", "replicated"}
        assert len({r["tokens"] for r in measured}) == 1
    for r in records:
        assert r["groups"] == r["ledger"]["groups_consumed"] == 2
        assert r["ledger"]["tokens_consumed"] == r["tokens"] and r["inherited_share"] == 0
        assert r["seconds"] > 0 and r["update_s"] > 0


@pytest.mark.slow
def test_each_way_to_share_prefixes_makes_the_same_gradient_from_recorded_batches(tmp_path):
    options = ("--only", "prompts tiny", "--repeats", "1", "--recordings", tmp_path / "recorded")
    records = run_tiny("trees", tmp_path, *options)
    assert [r["arm"] for r in records] == ["off", "prompt", "tree"]
    off, prompt, tree = (r["tokens/saved_share"] for r in records)
    assert off == 0 < prompt < tree <= records[0]["tokens/shareable"]
    assert all(r["seconds"] > 0 and r["peak"] > r["added"] >= 0 for r in records)
