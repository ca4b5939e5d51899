"""certificate.json: what a job writes while it runs, after a resume, and when the engine's log-probs are wrong."""

import json
import re

import pytest
from fake_job import run_forked
from ranks import ForkedProcess, forkserver
from real_job import SMALL, launch, run_job, words_of

from scripts.lines import read
from scripts.report import make_page, render
from scripts.runs import load
from scripts.timeline import trace_of

OPTIONS = (
    "--async-ratio=0", "--groups-per-step=4", "--group-size=4", "--max-response-tokens=24", "--eval-every=0",
    "--certificate=2", "--save-every=2",
)  # fmt: skip


def certificate(folder):
    return json.loads((folder / "run/certificate.json").read_text())


def fake_job(folder, *words):
    """A job whose log-probs are made up, so the first check sees that."""
    output_path = folder / "output.txt"
    forkserver()
    job = ForkedProcess(target=run_forked, args=({}, str(output_path), list(words)))
    job.start()
    try:
        assert job.wait(120) == 0, output_path.read_text()[-1500:]
    finally:
        job.kill()
    return output_path.read_text()


def test_an_alarm_is_printed_once_written_and_continued_by_a_resume(tmp_path):
    """The run was killed after a check of step 6, which its checkpoint does not have."""
    new = (f"--runs-dir={tmp_path}", "--run-name=run", "--steps=4", *OPTIONS)
    printed = fake_job(tmp_path, *new)
    assert printed.count("certificate, rule size:") == 1
    first = certificate(tmp_path)
    assert [check["step"] for check in first["checks"]] == [2, 4]
    assert all("size" in check["alarms"] for check in first["checks"])
    lost = first | {"checks": [*first["checks"], first["checks"][-1] | {"step": 6}]}
    (tmp_path / "run/certificate.json").write_text(json.dumps(lost))
    printed = fake_job(tmp_path, f"--resume={tmp_path / 'run'}", "--steps=7", "--certificate=1")
    assert "rule size" not in printed
    resumed = certificate(tmp_path)
    assert [check["step"] for check in resumed["checks"]] == [2, 4, 5, 6, 7]
    assert resumed["checks"][:2] == first["checks"]
    verdict = r"ALARM from step 2 on \(size.*\), in 5 checks: \d+ tokens in 5 checks up to step 7"
    assert re.fullmatch(verdict, resumed["verdict"])
    events = read(tmp_path / "run/events.jsonl")
    texts = [event["text"] for event in events if event["event"] == "warning"]
    assert sum("certificate, rule size: recorded log-probs" in text for text in texts) == 1
    by_step = {line["step"]: line for line in read(tmp_path / "run/metrics.jsonl")}
    for check in resumed["checks"]:
        logged = by_step[check["step"]]
        assert check["tokens"] == logged["certificate/tokens"]
        broken = {name for name, value in logged.items() if "/alarm_" in name and value}
        assert {f"certificate/alarm_{rule}" for rule in check["alarms"]} == broken
    run = load(tmp_path / "run")
    page = make_page(run, trace_of(run), 0.0)
    assert page["facts"]["certificate"] == resumed["verdict"]
    assert "ALARM from step 2" in render(page)


@pytest.mark.e2e
def test_a_real_engine_agrees_with_the_stamped_weights_until_stamps_are_off_by_one(tmp_path):
    options = {"certificate": 1, "async_ratio": 0, "publish_delay": 1, "steps": 5}
    words = [f"--runs-dir={tmp_path}", "--run-name=run", *words_of(SMALL | options)]
    job = launch(["extras/certificate/tests/faults.py", "2", *words], tmp_path / "run")
    assert job.wait() == 0, job.output()[-3000:]
    checks = certificate(tmp_path)["checks"]
    # version 2 is the first that is stamped wrongly; step 4 trains on its tokens
    assert [bool(check["alarms"]) for check in checks] == [False] * 3 + [True] * 2
    sizes = job.values("certificate/mismatch_abs")
    assert max(sizes[:3]) < 1e-5 and min(sizes[3:]) > 1e-4
    (text,) = [e["text"] for e in job.events("warning") if "rule size" in e["text"]]
    assert text.startswith("step 4: certificate, rule size: recorded log-probs differ by")


@pytest.mark.e2e
@pytest.mark.slow
def test_two_ranks_and_kept_keys_bring_no_alarm(tmp_path):
    options = {"certificate": 2, "async_ratio": 2, "steps": 8, "on_update": "keep"}
    run_job(tmp_path, 2, **options)
    assert certificate(tmp_path)["verdict"].startswith("no alarm: ")
