import json
import os
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from data.tasks import load_task
from data.tiny import VOCABULARY, build_tokenizer, sampled_accuracy
from data.tiny_model import untrained_model
from scripts import bench_peers, bench_peers_ours, bench_peers_trl
from scripts import bench_peers_report as report
from scripts.bench_peers_attention import varlen_attention
from scripts.bench_rollout_report import append

MADE_BY = {"size": "full", "command": "python bench", "commit": "c0ffee", "dirty": False, "hardware": "2 CPU cores"}
MADE_BY |= {"load_before": 0.1, "packages": {"torch": "2"}}


def run_of(arm, work="long", **measured):
    defaults = {"samples_per_s": 1.0, "tokens_per_s": 2.0, "tokens_per_sample": 2.0, "start_s": 9.0}
    return {"arm": arm, "work": work, **defaults, "peak_memory_gb": 1.5, **measured, **MADE_BY}


def test_packed_attention_is_causal_attention_of_each_segment_on_its_own():
    torch.manual_seed(0)
    lengths_q, lengths_k = [3, 1, 5, 2] * 20, [3, 7, 5, 9] * 20  # more segments than are computed at once
    starts_q, starts_k = (torch.tensor([0, *lengths]).cumsum(0).int() for lengths in (lengths_q, lengths_k))
    query, key, value = (torch.randn(int(starts[-1]), 2, 4) for starts in (starts_q, starts_k, starts_k))
    packed = varlen_attention(query, key, value, starts_q, starts_k, 5, 9, softmax_scale=0.3, causal=True)
    for s, (num_q, num_k) in enumerate(zip(lengths_q, lengths_k, strict=True)):
        for i in range(num_q):
            seen = slice(int(starts_k[s]), int(starts_k[s]) + num_k - num_q + i + 1)
            for head in range(2):
                scores = key[seen, head] @ query[starts_q[s] + i, head] * 0.3
                expected = scores.softmax(0) @ value[seen, head]
                torch.testing.assert_close(packed[starts_q[s] + i, head], expected, rtol=1e-5, atol=1e-6)


def test_packed_attention_passes_gradients_on():
    starts = torch.tensor([0, 2, 5], dtype=torch.int32)
    query, key, value = (torch.randn(5, 1, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    assert torch.autograd.gradcheck(
        lambda q, k, v: varlen_attention(q, k, v, starts, starts, 3, 3, softmax_scale=0.5), (query, key, value)
    )


def test_steady_state_begins_with_the_end_of_the_first_quarter():
    times = [100.0, 101.0, 102.0, 102.5, 103.0, 103.5, 104.0, 104.5]
    lines = [{"time": t, "samples": 4, "tokens": 10 + i} for i, t in enumerate(times)]
    found = bench_peers.steady_state(lines)
    assert found["step_s"] == 0.5 and found["samples_per_s"] == 8.0
    assert found["tokens_per_s"] == (13 + 14 + 15 + 16 + 17) / 2.5 and found["tokens_per_sample"] == 75 / 20


def test_time_to_an_accuracy_is_that_of_the_first_weights_which_have_it():
    curve = [(4, 10.0, 0.5), (8, 11.0, 0.81), (12, 12.0, 0.79), (16, 13.0, 0.9)]
    assert report.seconds_to(curve) == 11.0
    assert report.seconds_to(curve, 0.95) is None


def test_weights_that_were_kept_are_scored_on_held_out_problems(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_peers, "EVAL_PROBLEMS", 8)
    model = untrained_model(VOCABULARY)
    model.save_pretrained(tmp_path / "model")
    build_tokenizer().save_pretrained(tmp_path / "model")
    for folder, seconds in (("snapshots/step_12", 30.0), ("run/checkpoints/step_4", 20.0)):
        (tmp_path / folder).mkdir(parents=True)
        weights = {name: p.detach() + 0.1 * seconds for name, p in model.named_parameters()}
        save_file(weights, tmp_path / folder / "model.safetensors")
        os.utime(tmp_path / folder / "model.safetensors", (1000 + seconds, 1000 + seconds))
    curve = bench_peers.accuracy_curve(tmp_path, str(tmp_path / "model"), started_at=1000.0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 3.0
    expected = sampled_accuracy(model, load_task("addition", 0).eval_problems(8))
    assert curve == [(4, 20.0, curve[0][2]), (12, 30.0, expected)]


def test_ours_keeps_its_weights_under_their_names(tmp_path):
    weights = {"a": torch.ones(2), "b": torch.zeros(3)}
    bench_peers_ours.save_weights(SimpleNamespace(named_full_parameters=weights.items), str(tmp_path / "step_4"))
    assert {name: w.tolist() for name, w in load_file(tmp_path / "step_4/model.safetensors").items()} == {
        "a": [1.0, 1.0],
        "b": [0.0, 0.0, 0.0],
    }


def test_steps_of_ours_are_read_from_its_run(tmp_path):
    events = [{"event": "update"}, {"event": "step", "step": 1, "spans": [["wait", 5.0, 6.0], ["other", 6.0, 6.5]]}]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "tokens/trained": 700}) + "\n")
    assert bench_peers_ours.steps_of(tmp_path) == [{"step": 1, "time": 6.5, "samples": 256, "tokens": 700}]


def test_tokens_of_a_step_of_trl_are_read_from_its_log():
    assert bench_peers_trl.trained_tokens({"completions/mean_length": 2.5}) == 640
    assert bench_peers_trl.trained_tokens({"completions/mean_length": 3, "batch/trained_tokens_per_step": 7}) == 7
    assert bench_peers_trl.trained_tokens({"train_runtime": 3.0}) is None


def test_trl_is_asked_and_rewarded_as_the_task_says():
    row, talk = bench_peers_trl.problems(False)[0], bench_peers_trl.problems(True)[0]
    problem = load_task("addition", 0).train_problem(0)
    assert row == {"prompt": problem.prompt, "answer": problem.answer}
    assert talk["prompt"] == [{"role": "user", "content": problem.prompt}]
    completions = [problem.answer, [{"role": "assistant", "content": "nothing"}]]
    assert bench_peers_trl.addition_reward(completions, [problem.answer] * 2) == [1.0, 0.0]


def test_the_template_of_a_conversation_is_the_text_as_it_is(tmp_path):
    build_tokenizer().save_pretrained(tmp_path)
    tokenizer = bench_peers_trl.plain_tokenizer(str(tmp_path))
    prompt = load_task("addition", 0).train_problem(0).prompt
    messages = [{"role": "user", "content": prompt}]
    talk = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert talk == tokenizer.encode(prompt)


def test_ours_is_compared_with_the_best_of_trl_and_both_with_the_machine():
    rates = {"ours α=1": 150.0, "ours α=2": 180.0, "TRL a": 30.0, "TRL b": 60.0}
    rates |= {"generation alone": 400.0, "training alone": 1200.0}
    cost = {"cores": 2, "cpu_ms_per_sample": 10.0, "cores_busy": 1.8}
    arms = {name: [run_of(name, samples_per_s=rate, **cost)] * 3 for name, rate in rates.items()}
    line = " ".join(report.comparison(arms, "long"))
    assert "ours α=2 ÷ TRL b: 3.00× samples/s (target 2×: reached)" in line
    assert "at the CPU time of ours α=2: 200 samples/s, of which it has 90%." in line
    assert "at the CPU time of TRL b: 200 samples/s, of which it has 30%." in line
    assert "Generation alone: 400 samples/s; training alone: 1200." in line
    arms["TRL c"] = [run_of("TRL c", samples_per_s=100.0)]
    assert "1.80× samples/s (target 2×: missed)" in " ".join(report.comparison(arms, "long"))


def test_the_tables_have_medians_spread_and_what_was_not_reached(tmp_path):
    for repeat, seconds in enumerate([50.0, None, 70.0]):
        append(run_of("TRL a", samples_per_s=10.0 + repeat, to_accuracy_s=seconds), tmp_path / "peers.jsonl")
        append(run_of("ours α=1", to_accuracy_s=40.0), tmp_path / "peers.jsonl")
    append(run_of("ours α=1", work="short"), tmp_path / "peers.jsonl")
    report.write(tmp_path)
    text = (tmp_path / "table.md").read_text()
    assert (
        "| TRL a | 3 | 11 [10–12] | 2 [2–2] | 2.0 [2.0–2.0] | – | – | 2 of 3 runs | 9 [9–9] | 1.5 [1.5–1.5] |" in text
    )
    assert (
        "| 40 [40–40] | 9 [9–9] |" in text
        and "| ours α=1 | 1 | 1 [1–1] | 2 [2–2] | 2.0 [2.0–2.0] | – | – | – |" in text
    )


def test_an_arm_that_is_measured_again_replaces_its_own_lines_alone(tmp_path):
    path = tmp_path / "peers.jsonl"
    report.forget("a", "long", path)
    for arm, work in (("a", "long"), ("a", "short"), ("b", "long")):
        append(run_of(arm, work), path)
    report.forget("a", "long", path)
    assert [(r["arm"], r["work"]) for r in map(json.loads, path.read_text().splitlines())] == [
        ("a", "short"),
        ("b", "long"),
    ]


def test_a_run_that_fails_says_so_with_its_last_lines(tmp_path):
    command = [sys.executable, "-c", "print('something'); raise SystemExit(3)"]
    with pytest.raises(RuntimeError, match=r"(?s)ended with status 3; its last lines.*something"):
        bench_peers.run(command, dict(os.environ), tmp_path / "log")


def test_a_run_that_hangs_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_peers, "TIMEOUT_S", 0.2)
    with pytest.raises(RuntimeError, match=r"ended with status none after 0\.2 s"):
        bench_peers.run(["sleep", "60"], dict(os.environ), tmp_path / "log")


def test_memory_and_cpu_time_of_a_process_that_has_gone_are_nothing():
    assert bench_peers.tree_memory(os.getpid()) > 1e7 and bench_peers.tree_cpu(os.getpid()) > 0.1
    assert bench_peers.tree_memory(2**22 + 1) == bench_peers.tree_cpu(2**22 + 1) == 0


def test_cores_busy_are_those_between_two_moments_and_not_of_what_has_ended_by_the_second(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_peers, "POLL_S", 0.1)
    begun = time.time()
    usage = bench_peers.run([sys.executable, "-c", BUSY], dict(os.environ), tmp_path / "log")
    assert usage.peak_memory > 1e6
    assert 0.3 < usage.cores_busy(begun + 0.5, begun + 1.5) <= 1.1
    usage.cpu = [(0.0, 0.0), (2.0, 4.0), (4.0, 7.0), (6.0, 1.0)]
    assert usage.cores_busy(1.0, 5.0) == (7.0 - 2.0) / 3.0, "at 6.0 most processes have gone"
    assert usage.cores_busy(4.5, 5.0) == 0.0, "nobody looked"


BUSY = """
import time
while time.process_time() < 1.8: pass
"""


@pytest.mark.parametrize("arm", bench_peers.ARMS.values(), ids=lambda arm: arm.name)
def test_an_arm_runs_a_script_that_exists_in_the_right_environment(arm):
    assert (bench_peers.ROOT / "scripts" / arm.script).exists()
    assert arm.is_peer == arm.name.startswith("TRL")
    assert bench_peers.environment(arm)["OMP_NUM_THREADS"] == str(arm.threads)
