"""The harness: turns, records, tables. Every bench once, tiny, and its stored page from its stored records."""

import json
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
from programs import run_python

from scripts.bench import harness, rollout
from scripts.bench.harness import Arguments, Bench, Case
from scripts.lines import read

MADE = {
    "size": "full", "command": "python bench", "commit": "c0ffee", "dirty": False, "changes": "",
    "hardware": "2 CPU cores", "load_before": 0.1, "packages": {"torch": "2"},
}  # fmt: skip


@pytest.fixture
def race(tmp_path, monkeypatch):
    """A bench of two arms that write down what is done with them; each measures 1, 2, … seconds."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    race = SimpleNamespace(log=[], dying="", out=tmp_path)

    @contextmanager
    def start(arm, logs):
        race.log.append(f"start {arm}")
        (logs / arm).touch()
        yield partial(measure, arm)
        race.log.append(f"end {arm}")

    def measure(arm):
        race.log.append(arm)
        if arm == race.dying:
            raise RuntimeError("died")
        return {"seconds": float(race.log.count(arm))}

    def run(repeats, made=MADE):
        race.log.clear()
        harness.measure(race.bench, race.case, repeats, tmp_path / "race.jsonl", made)
        records = read(tmp_path / "race.jsonl")
        return race.log, [(r["arm"], r["repeat"], r["seconds"]) for r in records]

    race.run, race.case = run, Case("race on foot", {arm: partial(start, arm) for arm in "ab"})
    defaults = Arguments(out=tmp_path)
    key = ("case", "arm")
    race.bench = Bench("race", "A race", lambda _: [race.case], lambda _: [], key, defaults)
    return race


def test_arms_take_turns_and_a_bench_resumes_and_what_other_makers_measured_is_replaced(race):
    race.dying = "b"
    with pytest.raises(RuntimeError, match="died"):
        race.run(2)
    assert {"end a", "end b"} < {*race.log} and not (race.out / "race.jsonl").exists()
    assert len([*race.out.glob("bench-*/*")]) == 2, "logs are kept after a failure"
    race.dying = ""
    log, records = race.run(2)
    assert log[:8] == ["start a", "start b", "a", "b", "a", "b", "b", "a"]
    assert records == [("a", 0, 2.0), ("b", 0, 2.0), ("b", 1, 3.0), ("a", 1, 3.0)]
    assert len([*race.out.glob("bench-*")]) == 1, "and after no other end"
    assert race.run(2) == ([], records), "all is done"
    path = race.out / "race.jsonl"
    failed = [r | {"failed": "it fell"} if r["repeat"] else r for r in read(path)]
    path.write_text("".join(json.dumps(record) + "\n" for record in failed))
    assert race.run(2)[0][4:6] == ["b", "a"], "what failed is measured again"
    _, records = race.run(1, MADE | {"commit": "another"})
    assert records == [("a", 0, 2.0), ("b", 0, 2.0)]


def test_uncommitted_changes_make_no_records_in_results_and_what_memory_lacks_is_not_started(race):
    dirty, results = {**MADE, "dirty": True}, harness.ROOT / "results" / "race"
    harness.check([race.case], race.out, dirty)
    harness.check([race.case], results, MADE)
    with pytest.raises(ValueError, match="uncommitted"):
        harness.check([race.case], results, dirty)
    with pytest.raises(ValueError, match="needs 1000000 GB"):
        harness.check([replace(race.case, memory=1e15)], race.out, MADE)


# The benches


def test_the_stored_records_give_the_stored_page(tmp_path):
    stored = harness.ROOT / "results/rollout"
    (tmp_path / "rollout.jsonl").symlink_to(stored / "rollout.jsonl")
    harness.write(rollout.BENCH, tmp_path)
    assert (tmp_path / "table.md").read_text() == (stored / "table.md").read_text()


def run_tiny(script, out, *options):
    words = ("--size", "tiny", "--out", out, *options)
    done = run_python(f"scripts/bench/{script}.py", *words)
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
