import contextlib
import json
import re
import subprocess
import sys

import pytest

from scripts.bench import harness
from scripts.bench.harness import Arm, Bench, Case, Column
from scripts.lines import read

MADE = {
    "size": "full", "command": "python bench", "commit": "c0ffee", "dirty": False, "changes": "",
    "hardware": "2 CPU cores", "load_before": 0.1, "packages": {"torch": "2"},
}  # fmt: skip


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    """Logs that are kept after a failure go with the test."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


class Counting:
    """An arm that tells `log` all that is done with it, and measures 1.0, 2.0, …"""

    def __init__(self, name, log, dies_at=None):
        self.name, self.log, self.dies_at, self.num = name, log, dies_at, 0

    @contextlib.contextmanager
    def start(self, logs):
        self.log.append(f"start {self.name}")
        (logs / self.name).touch()
        yield self.measure
        self.log.append(f"end {self.name}")

    def measure(self):
        self.num += 1
        self.log.append(self.name)
        if self.num == self.dies_at:
            raise RuntimeError("died")
        return {"seconds": float(self.num)}


def bench_of(log, **more):
    arms = [Arm(name, Counting(name, log).start, {"fast": name == "b"}) for name in "ab"]
    case = Case("race on foot", arms, **more)
    key = ("case", "arm")
    return Bench("race", "A race", lambda given: [case], lambda records: [], key=key), case


def records_of(path):
    return [(r["arm"], r["repeat"], r["seconds"]) for r in read(path)]


def run(bench, monkeypatch, *options):
    monkeypatch.setattr("sys.argv", ["race.py", *map(str, options)])
    return harness.main(bench)


def test_arms_are_measured_in_turn_every_second_round_backwards_and_the_first_round_is_dropped(
    tmp_path,
):
    log, path = [], tmp_path / "race.jsonl"
    bench, case = bench_of(log)
    harness.measure(bench, case, 2, path, MADE)
    assert log[:8] == ["start a", "start b", "a", "b", "a", "b", "b", "a"]
    assert sorted(log[8:]) == ["end a", "end b"]
    assert records_of(path) == [("a", 0, 2.0), ("b", 0, 2.0), ("b", 1, 3.0), ("a", 1, 3.0)]
    assert read(path)[1]["options"] == {"fast": True}
    assert not list(tmp_path.glob("bench-*")), "logs are kept after a failure only"


def test_a_bench_resumes_where_it_stopped_and_measures_nothing_twice(tmp_path):
    log, path = [], tmp_path / "race.jsonl"
    bench, case = bench_of(log, warm_up=0)
    dying_arm = Arm("b", Counting("b", log, dies_at=1).start)
    dying = Case(case.name, [case.arms[0], dying_arm], warm_up=0)
    with pytest.raises(RuntimeError, match="died"):
        harness.measure(bench, dying, 2, path, MADE)
    assert records_of(path) == [("a", 0, 1.0)] and "end a" in log
    assert sorted(path.name for path in tmp_path.glob("bench-*/*")) == ["a", "b"]
    harness.measure(bench, case, 2, path, MADE)
    assert records_of(path) == [("a", 0, 1.0), ("b", 0, 1.0), ("b", 1, 2.0), ("a", 1, 2.0)]
    log.clear()
    harness.measure(bench, case, 2, path, MADE)
    assert log == []


def test_what_other_code_measured_of_the_same_arm_is_replaced_and_what_failed_is_measured_again(
    tmp_path,
):
    path = tmp_path / "race.jsonl"
    bench, case = bench_of([], warm_up=0)
    old, failed = {**MADE, "commit": "old"}, {**MADE, "failed": "it fell"}
    lines = [
        {"case": "race on foot", "arm": arm, "repeat": i, "seconds": 9.0, **old}
        for i in range(3)
        for arm in "abc"
    ]
    lines.append({"case": "race on foot", "arm": "a", "repeat": 0, "seconds": 8.0, **failed})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    harness.measure(bench, case, 1, path, MADE)
    assert records_of(path) == [*(("c", i, 9.0) for i in range(3)), ("a", 0, 1.0), ("b", 0, 1.0)]


def test_a_case_can_make_its_own_records_of_a_round(tmp_path):
    bench, case = bench_of(
        [], records=lambda found: [{"arm": "b/a", "seconds": found["b"]["seconds"] / 2}]
    )
    for _ in range(2):
        harness.measure(bench, case, 1, tmp_path / "race.jsonl", MADE)
    assert records_of(tmp_path / "race.jsonl") == [("b/a", 0, 1.0)]


def test_columns_show_median_spread_gain_and_whether_the_target_is_reached():
    rows = {"slow": [{"s": seconds} for seconds in (4.0, 6.0, 5.0)]}
    rows["fast"] = [{"s": seconds} for seconds in (2.0, 1.0, 3.0)]
    column = Column("s", "ms", ".0f", 1000, better=-1, against="faster", target=2500)
    assert harness.table("arm", rows, [column, Column("none", "nothing")]) == [
        "| arm | n | ms | faster | target | reached | nothing |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| slow | 3 | 5000 [4000–6000] | 1.00 [1.00–1.00] | ≤ 2500 | no | – |",
        "| fast | 3 | 2000 [1000–3000] | 2.50 [1.67–6.00] | ≤ 2500 | yes | – |",
    ]
    more = Column("s", "1/s", ".1f", better=1, against="more", target=2)
    cells = more.cells([{"s": 3.0}, {"s": None}], [{"s": 2.0}])
    assert cells == ["3.0 [3.0–3.0], n = 1", "1.50 [1.50–1.50]", "≥ 2", "yes"]


def test_the_page_names_what_made_the_records(tmp_path, monkeypatch):
    bench, _ = bench_of([])
    options = ("--repeats", 2, "--only", "race", "--size", "tiny")
    found = run(bench, monkeypatch, "--out", tmp_path, *options)
    assert [(r["arm"], r["repeat"]) for r in found] == [("a", 0), ("b", 0), ("b", 1), ("a", 1)]
    text, commit = (tmp_path / "table.md").read_text(), found[0]["commit"]
    assert "`scripts/bench/race.py`" in text and "Size tiny: the numbers mean nothing." in text
    assert f"commit {commit}" in text and len(commit) == 12 and "--repeats 2" in text


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--only", "nothing"], "--only 'nothing' is none of 'race', 'race on foot'"),
        (["--repeats", "0"], "--repeats must be at least 1, got 0"),
        (["--report"], r"race\.jsonl has no records; run python scripts/bench/race\.py first"),
        ([], r"'race on foot' needs 1000000 GB of memory, \d+ GB are available"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(tmp_path, monkeypatch, capsys, options, error):
    with pytest.raises(SystemExit) as ended:
        run(bench_of([], memory=1e15)[0], monkeypatch, "--out", tmp_path, *options)
    assert ended.value.code == 2 and re.search(error, capsys.readouterr().err.splitlines()[-1])


def test_uncommitted_changes_make_no_records_in_results_and_are_said_elsewhere(tmp_path):
    made, (_, case) = {**MADE, "dirty": True}, bench_of([])
    harness.check([case], tmp_path, made)
    with pytest.raises(ValueError, match=r"changes are uncommitted; commit them or give --out"):
        harness.check([case], harness.ROOT / "results" / "race", made)
    assert "commit c0ffee, with changes; 2 CPU cores" in harness.made_by([made])[0]


SLOW = [
    pytest.param(name, marks=pytest.mark.slow) for name in ("parts", "trees", "peers")
]


@pytest.mark.parametrize("script", ["rollout", *SLOW])
def test_a_bench_runs_as_a_script_although_it_may_hide_a_module_of_that_name(script):
    command = [sys.executable, f"scripts/bench/{script}.py", "--help"]
    done = subprocess.run(command, cwd=harness.ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "--report" in done.stdout, done.stderr
