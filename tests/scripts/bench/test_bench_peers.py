"""The bench of peers: what TRL is given and says, what a run is told, and whom ours is compared with."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch
from transformers import TrainerState

from asyncrl.tasks import load_task
from asyncrl.weights.models import resolve_model
from scripts.bench import peers, peers_ours, peers_trl
from scripts.bench.peers import Arm
from scripts.bench.workloads import WORKLOADS
from scripts.lines import read
from scripts.make_tiny import RECIPES

NATURAL, SHORT, SMOLLM2 = (WORKLOADS[name] for name in ("natural", "short", "smollm2"))


@pytest.fixture(autouse=True)
def few_problems(monkeypatch):
    monkeypatch.setattr(peers_trl, "NUM_PROBLEMS", 2)


def test_packed_attention_is_causal_attention_of_each_segment_on_its_own():
    torch.manual_seed(0)
    lengths_q, lengths_k = [3, 1, 5, 2], [3, 7, 5, 9]
    starts_q, starts_k = (torch.tensor([0, *n]).cumsum(0).int() for n in (lengths_q, lengths_k))
    query = torch.randn(11, 4, 8)
    key, value = torch.randn(2, 24, 2, 8)
    packed = peers_trl.varlen_attention(
        query, key, value, starts_q, starts_k, 5, 9, softmax_scale=0.3, causal=True
    )
    row = 0
    for start, num_q, num_k in zip(starts_k.tolist(), lengths_q, lengths_k, strict=False):
        for seen in range(num_k - num_q + 1, num_k + 1):
            for head in range(4):
                keys, values = (t[start : start + seen, head // 2] for t in (key, value))
                weights = (0.3 * keys @ query[row, head]).softmax(0)
                torch.testing.assert_close(packed[row, head], weights @ values)
            row += 1


def test_the_recorder_writes_the_start_and_each_step_with_the_tokens_that_trl_logs(tmp_path):
    recorder = peers_trl.Recorder(tmp_path / "steps.jsonl", samples=64)
    peers_trl.Start(recorder).on_train_begin()
    recorder.on_step_end()
    mean, both = (
        {"completions/mean_length": 2.5},
        {"completions/mean_length": 3.0, "batch/trained_tokens_per_step": 7.0},
    )
    # the summary at the end would count the last step twice
    for step, logs in enumerate(
        [mean, both, both | {"train_runtime": 2.0}, {"loss": 0.0}], start=1
    ):
        recorder.on_log(None, TrainerState(global_step=step), None, logs=logs)
    lines = read(tmp_path / "steps.jsonl")
    steps = [(line["step"], line["samples"], line["tokens"]) for line in lines]
    assert steps == [(0, 0, 0.0), (1, 64, 160.0), (2, 64, 7.0)]
    assert lines[0]["time"] <= lines[1]["time"]


def test_trl_is_asked_and_rewarded_as_the_task_says():
    config = NATURAL.config(model=resolve_model("tiny", "addition"), seed=3)
    row, talk = (peers_trl.problems(config, conversational)[0] for conversational in (False, True))
    problem = load_task("addition", 3).train_problem(0)
    assert row == {"prompt": problem.prompt, "answer": problem.answer, "task": "addition"}
    assert talk["prompt"] == [{"role": "user", "content": problem.prompt}]
    completions = [problem.answer, [{"role": "assistant", "content": problem.answer}], "nothing"]
    rewards = peers_trl.task_reward(completions, [problem.answer] * 3, ["addition"] * 3)
    assert rewards == [1.0, 1.0, 0.0]
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


def test_trl_is_given_the_sizes_and_the_optimizer_of_our_job():
    given = peers_trl.common_options(SMOLLM2.config(seed=2, steps=30, runs_dir="here"))
    wanted = {"per_device_train_batch_size": 64, "num_generations": 8, "learning_rate": 4e-5, "bf16": True, "seed": 2,
              "max_completion_length": 20, "max_steps": 30, "output_dir": "here"}  # fmt: skip
    assert wanted.items() <= given.items()
    assert peers_trl.common_options(NATURAL.config())["bf16"] is False


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
import json, os, pathlib, sys, time
told = json.loads(sys.argv[1])
assert told["workload"] == "short" and told["seed"] == 7 and os.environ["OMP_NUM_THREADS"] == "3"
assert told.get("mode", "") == MODE and ("PEERS" in os.environ["PYTHONPATH"]) == bool(MODE)
lines = [{"time": time.time() + i * i, "samples": 256 * (i > 0), "tokens": 100 + i} for i in range(told["steps"] + 1)]
pathlib.Path(told["out"], "steps.jsonl").write_text("\\n".join(map(json.dumps, lines)))
sys.exit(told.get("num_rollout_workers", 0))
"""


@pytest.fixture
def measure(tmp_path, monkeypatch):
    """Measures with scripts that stand in for ours and for TRL's: step i of theirs ends at i² s."""
    folder = tmp_path / "scripts" / "bench"
    folder.mkdir(parents=True)
    for name, mode in (("ours", ""), ("trl", "async")):
        (folder / f"peers_{name}.py").write_text(f"MODE = {mode!r}\n{STANDS_IN}")
    monkeypatch.setattr(peers, "ROOT", tmp_path)
    return lambda arm: peers.measure(arm, SHORT, tmp_path / "PEERS", "tiny", iter([7]), tmp_path)


@pytest.mark.parametrize("mode", ["", "async"])
def test_a_run_is_told_its_workload_and_measured_from_the_end_of_the_first_quarter_on(
    measure, mode
):
    numbers = measure(Arm(mode, threads=3))
    assert {
        "work": "short",
        "steps": 5,
        "seed": 7,
        "peer": "trl==1.16.0",
    }.items() <= numbers.items()
    # steps 3, 4 and 5 end at 9, 16 and 25 s; step 2, the end of the first quarter, at 4 s
    assert numbers["step_s"] == pytest.approx(7.0, abs=1e-2)
    rates = [numbers["samples_per_s"], numbers["tokens_per_s"], numbers["tokens_per_sample"]]
    assert rates == pytest.approx([3 * 256 / 21, 312 / 21, 312 / 768], rel=1e-2)
    assert numbers["start_s"] - numbers["up_s"] == pytest.approx(1.0, abs=1e-2), (
        "the first line is the start"
    )


def test_a_run_that_fails_or_hangs_is_ended_with_its_last_lines(measure, tmp_path, monkeypatch):
    with pytest.raises(RuntimeError, match="status 5"):
        measure(Arm(threads=3, options={"num_rollout_workers": 5}))
    monkeypatch.setattr(peers, "TIMEOUT_S", 0.1)
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    with pytest.raises(RuntimeError, match="no status after"):
        peers.run(command, {}, tmp_path / "log")


def test_cores_busy_are_those_between_two_moments_and_not_of_what_has_ended_by_the_second():
    looks = [(0.0, 0.0, 0), (2.0, 4.0, 0), (4.0, 7.0, 0), (6.0, 1.0, 0)]
    assert peers.cores_busy(looks, 1.0, 5.0) == (7.0 - 2.0) / 3.0, "at 6.0 most processes have gone"
    assert peers.cores_busy(looks, 4.5, 5.0) == 0.0, "nobody looked"
    assert peers.look(2**22 + 1)[1:] == (0.0, 0), "there is no such process"


def test_an_arm_whose_groups_share_a_request_has_no_workload_of_several_lengths(tmp_path):
    arms = ["ours α=1", "ours α=4, trees, a request a group"]
    cases = peers.cases(SimpleNamespace(arms=arms, env=tmp_path, size="tiny"))
    assert [case.name for case in cases if list(case.arms) == arms] == [
        "natural",
        "short",
        "smollm2",
    ]
    assert [case.name for case in cases if list(case.arms) == arms[:1]] == ["long"]


def test_an_installation_that_is_there_is_left_alone_and_one_that_fails_says_why(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ValueError, match=r"pip install .* failed"):
        peers.install(tmp_path)
    for pin in peers.PINS:
        (tmp_path / f"{pin.replace('==', '-')}.dist-info").mkdir()
    peers.install(tmp_path)


# Tables


def test_ours_is_compared_with_the_run_of_trls_fastest_arm_whose_turn_was_beside_its_own():
    rates = {
        "ours α=1": (150.0, 150.0, 150.0), "ours α=2": (200.0, 100.0, 300.0),
        "TRL a": (30.0, 30.0, 30.0), "TRL b": (100.0, 50.0, 100.0),
    }  # fmt: skip
    made = {"work": "long", "cores": 2, "cores_busy": 1.8}
    records = [
        {**made, "arm": arm, "repeat": i, "samples_per_s": rate, "commit": "abc"}
        for arm, of_arm in rates.items()
        for i, rate in enumerate(of_arm)
    ]
    records += [records[3] | {"repeat": 3}, records[4] | {"commit": "another"}]
    (pairs,) = peers.best_pairs(records).values()
    assert list(pairs) == ["ours α=2", "TRL b"]
    ours = pairs["ours α=2"]
    assert [r["over_peer"] for r in ours] == [2.0, 2.0, 3.0]
    assert ours[0]["over_limit"] == 0.9 and ours[0]["limit"] == pytest.approx(200 / 0.9)
    assert peers.best_pairs(records[:6]) == {}, "without TRL nothing is compared"


def test_the_time_to_an_accuracy_is_infinite_where_it_was_not_reached():
    record = {"curve": [], "to_accuracy_s": None, "up_s": 3.0}
    assert peers.completed(record)["learning_s"] == float("inf")
    assert peers.completed(record | {"to_accuracy_s": 9.0})["learning_s"] == 6.0
