"""The bench of peers: what TRL is given and says, what a run is told, and the tables of stored records."""

import json
import os
import statistics
import sys
import time

import pytest
import torch
from transformers import TrainerState

from asyncrl.tasks import load_task
from asyncrl.weights.models import resolve_model
from scripts.bench import harness, peers, peers_ours, peers_trl
from scripts.bench.work import NATURAL, SHORT, SMOLLM2
from scripts.lines import read
from scripts.make_tiny import RECIPES

# TRL


def test_packed_attention_is_causal_attention_of_each_segment_on_its_own():
    torch.manual_seed(0)
    # more segments than are computed at once
    lengths_q, lengths_k = [3, 1, 5, 2] * 20, [3, 7, 5, 9] * 20
    starts_q, starts_k = (
        torch.tensor([0, *lengths]).cumsum(0).int() for lengths in (lengths_q, lengths_k)
    )
    sizes = (sum(lengths_q), sum(lengths_k), sum(lengths_k))
    query, key, value = (torch.randn(n, 2, 4, requires_grad=True) for n in sizes)
    packed = peers_trl.varlen_attention(
        query, key, value, starts_q, starts_k, 5, 9, softmax_scale=0.3, causal=True
    )
    rows = []
    for s, (num_q, num_k) in enumerate(zip(lengths_q, lengths_k, strict=True)):
        for i in range(num_q):
            seen = slice(int(starts_k[s]), int(starts_k[s]) + num_k - num_q + i + 1)
            scores = torch.einsum("khd,hd->hk", key[seen], query[starts_q[s] + i]) * 0.3
            rows.append(torch.einsum("hk,khd->hd", scores.softmax(1), value[seen]))
    expected = torch.stack(rows)
    torch.testing.assert_close(packed, expected, rtol=1e-5, atol=1e-6)
    weights = torch.randn_like(packed)
    for found, wanted in zip(
        torch.autograd.grad((packed * weights).sum(), (query, key, value)),
        torch.autograd.grad((expected * weights).sum(), (query, key, value)),
        strict=True,
    ):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_tokens_of_a_step_of_trl_are_read_from_its_log():
    assert peers_trl.trained_tokens({"completions/mean_length": 2.5}, samples=64) == 160
    both = {"completions/mean_length": 3, "batch/trained_tokens_per_step": 7}
    assert peers_trl.trained_tokens(both, 64) == 7
    # a line of the summary would count the last step twice
    assert peers_trl.trained_tokens(both | {"train_runtime": 3.0}, 64) is None


def test_the_recorder_writes_the_start_and_each_step(tmp_path):
    recorder = peers_trl.Recorder(tmp_path / "steps.jsonl", samples=64)
    peers_trl.Start(recorder).on_train_begin()
    recorder.on_step_end()
    state = TrainerState(global_step=1)
    recorder.on_log(None, state, None, logs={"completions/mean_length": 2.0})
    recorder.on_log(None, state, None, logs={"train_runtime": 2.0})
    start, step = read(tmp_path / "steps.jsonl")
    assert (start["step"], step["step"], step["samples"], step["tokens"]) == (0, 1, 64, 128.0)
    assert start["time"] <= step["time"] <= time.time()


def test_trl_is_asked_and_rewarded_as_the_task_says():
    config = NATURAL.config(model=resolve_model("tiny", "addition"), seed=3)
    row, talk = peers_trl.problems(config, False)[0], peers_trl.problems(config, True)[0]
    problem = load_task("addition", 3).train_problem(0)
    assert row == {"prompt": problem.prompt, "answer": problem.answer, "task": "addition"}
    assert talk["prompt"] == [{"role": "user", "content": problem.prompt}]
    completions = [problem.answer, [{"role": "assistant", "content": "nothing"}]]
    assert peers_trl.task_reward(completions, [problem.answer] * 2, ["addition"] * 2) == [1.0, 0.0]
    assert peers_trl.task_reward(["It is 7."], ["7"], ["sums:one_digit"]) == [1.0]


def test_trl_is_asked_in_the_tokens_of_our_prompts_with_and_without_a_chat_template(tmp_path):
    tokenizer = RECIPES["addition"].tokenizer
    tokenizer.save_pretrained(tmp_path / "plain")
    plain = peers_trl.plain_tokenizer(str(tmp_path / "plain"))
    prompt = load_task("addition", 0).train_problem(0).prompt
    messages = [{"role": "user", "content": prompt}]
    talk = plain.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert talk == plain.encode(prompt)
    tokenizer.chat_template = "a ={% for message in messages %} b ={% endfor %}"
    tokenizer.save_pretrained(tmp_path / "chat")
    row = peers_trl.problems(SMOLLM2.config(model=str(tmp_path / "chat")), False)[0]
    task = load_task("sums:one_digit", 0)
    asked = task.encode_prompt(task.train_problem(0), tokenizer)
    assert tokenizer(row["prompt"])["input_ids"] == asked and len(asked) == 6
    assert row["answer"] == task.train_problem(0).answer


def test_trl_is_given_the_sizes_and_the_optimizer_of_our_job():
    given = peers_trl.common_options(SMOLLM2.config(seed=2, steps=30, runs_dir="here"))
    wanted = {"per_device_train_batch_size": 64, "num_generations": 8, "learning_rate": 4e-5, "bf16": True, "seed": 2,
              "max_completion_length": 20, "max_steps": 30, "output_dir": "here"}  # fmt: skip
    assert wanted.items() <= given.items()
    given = peers_trl.common_options(NATURAL.config())
    wanted = {"learning_rate": 1e-3, "bf16": False, "per_device_train_batch_size": 256}
    assert wanted.items() <= given.items()


# Runs


def test_steps_of_ours_are_read_from_its_run(tmp_path):
    events = [
        {"event": "worker_ready", "time": 4.5},
        {"event": "worker_ready", "time": 5.5},
        {"event": "step", "step": 1, "spans": [["wait", 5.0, 6.0], ["other", 6.0, 6.5]]},
    ]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "tokens/trained": 700}) + "\n")
    assert peers_ours.steps_of(tmp_path, samples=64) == [
        {"step": 0, "time": 4.5, "samples": 0, "tokens": 0.0},
        {"step": 1, "time": 6.5, "samples": 64, "tokens": 700},
    ]


STANDS_IN = """
import json, pathlib, sys
told = json.loads(sys.argv[1])
assert "mode" not in told and told["work"] == "short" and told["seed"] == 7
tokens = 256 * told["num_rollout_workers"]
lines = [{"time": i, "samples": 256 * (i > 0), "tokens": tokens} for i in range(told["steps"] + 1)]
pathlib.Path(told["out"], "steps.jsonl").write_text("\\n".join(map(json.dumps, lines)))
"""


def test_a_run_is_told_its_work_and_what_it_says_is_kept(tmp_path, monkeypatch):
    """A script that stands in for ours: it writes what it was told as its steps."""
    (tmp_path / "scripts" / "bench").mkdir(parents=True)
    (tmp_path / "scripts" / "bench" / "peers_ours.py").write_text(STANDS_IN)
    monkeypatch.setattr(peers, "ROOT", tmp_path)
    way = peers.Way(options={"num_rollout_workers": 3})
    found = peers.measure(way, SHORT, tmp_path, True, iter([7]), tmp_path)
    wanted = {"work": "short", "steps": 5, "seed": 7, "peer": "trl==1.16.0"}
    assert wanted.items() <= found.items()
    assert found["start_s"] - found["up_s"] == pytest.approx(1.0), "the first line is the start"
    assert found["tokens_per_sample"] == 3.0 and found["samples_per_s"] == pytest.approx(256.0)


def test_steady_state_begins_with_the_end_of_the_first_quarter():
    times = [100.0, 101.0, 102.0, 102.5, 103.0, 103.5, 104.0, 104.5]
    lines = [{"time": t, "samples": 4, "tokens": 10 + i} for i, t in enumerate(times)]
    tokens_per_s = (13 + 14 + 15 + 16 + 17) / 2.5
    rates = {"samples_per_s": 8.0, "tokens_per_s": tokens_per_s, "tokens_per_sample": 75 / 20}
    assert peers.steady_state(lines) == {"step_s": 0.5, **rates}


@pytest.mark.parametrize(
    ("command", "error"),
    [
        ("print('something'); exit(3)", r"(?s)ended with status 3; its last lines.*something"),
        ("import time; time.sleep(60)", r"ended with status none after 0\.5 s"),
    ],
)
def test_a_run_that_fails_or_hangs_is_ended_with_its_last_lines(
    tmp_path, monkeypatch, command, error
):
    monkeypatch.setattr(peers, "TIMEOUT_S", 0.5 if "sleep" in command else 60.0)
    with pytest.raises(RuntimeError, match=error):
        peers.run([sys.executable, "-c", command], dict(os.environ), tmp_path / "log")


def test_cores_busy_are_those_between_two_moments_and_not_of_what_has_ended_by_the_second(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(harness, "POLL_S", 0.1)
    busy = "import time\nwhile time.process_time() < 1.8: pass"
    looks = peers.run([sys.executable, "-c", busy], dict(os.environ), tmp_path / "log")
    assert max(memory for *_, memory in looks) > 1e6
    (begun, _, _), (ended, used, _) = looks[0], looks[-1]
    assert used > 1.0 and peers.cores_busy(looks, begun, time.time()) == used / (ended - begun)
    looks = [(0.0, 0.0, 0), (2.0, 4.0, 0), (4.0, 7.0, 0), (6.0, 1.0, 0)]
    assert peers.cores_busy(looks, 1.0, 5.0) == (7.0 - 2.0) / 3.0, "at 6.0 most processes have gone"
    assert peers.cores_busy(looks, 4.5, 5.0) == 0.0, "nobody looked"
    assert peers.look(2**22 + 1)[1:] == (0.0, 0), "there is no such process"


def test_an_arm_has_the_environment_that_it_needs(tmp_path):
    for name, way in peers.WAYS.items():
        found = peers.environment(way, tmp_path)
        assert way.is_peer == name.startswith("TRL") == (str(tmp_path) in found["PYTHONPATH"])
        assert found["OMP_NUM_THREADS"] == str(way.threads)


def test_an_installation_that_is_there_is_left_alone_and_one_that_fails_says_why(
    tmp_path, monkeypatch
):
    for pin in peers.PINS:
        (tmp_path / f"{pin.replace('==', '-')}.dist-info").mkdir()
    monkeypatch.setattr(sys, "executable", "/bin/false")
    peers.install(tmp_path)
    with pytest.raises(ValueError, match=r"pip install .* failed"):
        peers.install(tmp_path / "another")


# Tables


def run_of(arm, work="long", **measured):
    defaults = {"samples_per_s": 1.0, "tokens_per_s": 2.0, "tokens_per_sample": 2.0, "start_s": 9.0}
    made = {"commit": "abc", "repeat": 0, "peak_memory_gb": 1.5}
    return {"arm": arm, "work": work, **defaults, **made, **measured}


def cells(lines, name):
    """Heading -> cell of the row of an arm."""
    heading, row = (
        next(line for line in lines if what in line).strip("| ").split(" | ")
        for what in ("| n |", name)
    )
    return dict(zip(heading, row, strict=True))


def test_ours_is_compared_with_the_best_of_trl_and_both_with_the_machine():
    rates = {"ours α=1": 150.0, "ours α=2": 180.0, "TRL a": 30.0, "TRL b": 60.0}
    cost = {"cores": 2, "cpu_ms_per_sample": 10.0, "cores_busy": 1.8}
    records = [
        run_of(name, "natural", samples_per_s=rate, repeat=i, **cost)
        for i in range(3)
        for name, rate in rates.items()
    ]
    lines = peers.summary(records)
    assert len(lines) == 4, "the best of each"
    ours, peer = cells(lines, "ours α=2"), cells(lines, "TRL b")
    assert (ours["÷ TRL"], ours["aim"], ours["reached"]) == ("3.00 [3.00–3.00]", "≥ 2 ÷ TRL", "yes")
    assert peer["÷ TRL"] == "–" and peer["samples/s"] == "60.0 [60.0–60.0]"
    assert ours["÷ limit of the machine"] == "0.90 [0.90–0.90]"
    long = [{**record, "work": "long"} for record in records]
    assert cells(peers.summary(long), "ours α=2")["reached"] == "no", "the limit counts there"
    lines = peers.summary([*records, run_of("TRL c", "natural", samples_per_s=100.0)])
    ours = cells(lines, "ours α=2")
    assert (ours["÷ TRL"], ours["reached"]) == ("1.80 [1.80–1.80]", "no")
    assert len(peers.summary([run_of("ours α=1")])) == 2, "without TRL nothing is compared"


def test_runs_are_compared_with_the_one_whose_turn_was_beside_theirs():
    speeds = {"ours": (200.0, 100.0, 300.0), "TRL": (100.0, 50.0, 100.0)}
    records = [
        run_of(arm, samples_per_s=rate, repeat=i)
        for arm, rates in speeds.items()
        for i, rate in enumerate(rates)
    ]
    records += [run_of("TRL", commit="other", samples_per_s=1.0), run_of("ours", repeat=3)]
    (of_work,) = peers.ours(records).values()
    assert [r["over_peer"] for r in of_work] == [2.0, 2.0, 3.0]


def test_the_committed_records_give_their_page_and_a_row_of_each_work(tmp_path):
    folder = harness.ROOT / "results" / "peers"
    records = read(folder / "peers.jsonl")
    paragraphs = "\n\n".join(peers.report(records))
    assert (folder / "table.md").read_text().endswith(f"{paragraphs}\n")
    for work, arms in peers.arms_of(records).items():
        assert {peers.best(arms, "ours"), peers.best(arms, "TRL")} <= peers.WAYS.keys()
        ratio = f"{statistics.median(r['over_peer'] for r in peers.ours(records)[work]):.2f} ["
        ours, peer = (row for row in peers.summary(records) if row.startswith(f"| {work} |"))
        assert ratio in ours and "TRL" in peer
