"""The bench of rollout once, tiny, and its stored page from its stored records."""

import pytest
from programs import run_python

from scripts.bench import harness, rollout
from scripts.lines import read


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
