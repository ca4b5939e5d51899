import json
import os
import statistics
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

import train_async
from asyncrl.job.checkpoints import Checkpoints
from asyncrl.tasks import load_task
from asyncrl.weights.models import resolve_model
from scripts.bench import harness, peers, peers_ours, peers_trl
from scripts.bench.work import LONG, NATURAL, SHORT, SMOLLM2
from scripts.lines import read
from scripts.make_tiny import Adder, addition_tokenizer, success_rate, untrained_model


def run_of(arm, work="long", **measured):
    defaults = {"samples_per_s": 1.0, "tokens_per_s": 2.0, "tokens_per_sample": 2.0, "start_s": 9.0}
    made = {"commit": "abc", "repeat": 0, "peak_memory_gb": 1.5}
    return {"arm": arm, "work": work, **defaults, **made, **measured}


def test_packed_attention_is_causal_attention_of_each_segment_on_its_own():
    torch.manual_seed(0)
    # more segments than are computed at once
    lengths_q, lengths_k = [3, 1, 5, 2] * 20, [3, 7, 5, 9] * 20
    starts_q, starts_k = (
        torch.tensor([0, *lengths]).cumsum(0).int() for lengths in (lengths_q, lengths_k)
    )
    query, key, value = (
        torch.randn(int(starts[-1]), 2, 4) for starts in (starts_q, starts_k, starts_k)
    )
    packed = peers_trl.varlen_attention(
        query, key, value, starts_q, starts_k, 5, 9, softmax_scale=0.3, causal=True
    )
    for s, (num_q, num_k) in enumerate(zip(lengths_q, lengths_k, strict=True)):
        for i in range(num_q):
            seen = slice(int(starts_k[s]), int(starts_k[s]) + num_k - num_q + i + 1)
            for head in range(2):
                scores = key[seen, head] @ query[starts_q[s] + i, head] * 0.3
                expected = scores.softmax(0) @ value[seen, head]
                torch.testing.assert_close(
                    packed[starts_q[s] + i, head], expected, rtol=1e-5, atol=1e-6
                )


def test_packed_attention_passes_gradients_on():
    starts = torch.tensor([0, 2, 5], dtype=torch.int32)
    query, key, value = (
        torch.randn(5, 1, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)
    )
    assert torch.autograd.gradcheck(
        lambda q, k, v: peers_trl.varlen_attention(
            q, k, v, starts, starts, 3, 3, softmax_scale=0.5
        ),
        (query, key, value),
    )


def test_steady_state_begins_with_the_end_of_the_first_quarter():
    times = [100.0, 101.0, 102.0, 102.5, 103.0, 103.5, 104.0, 104.5]
    lines = [{"time": t, "samples": 4, "tokens": 10 + i} for i, t in enumerate(times)]
    found = peers.steady_state(lines)
    assert found["step_s"] == 0.5 and found["samples_per_s"] == 8.0
    assert (
        found["tokens_per_s"] == (13 + 14 + 15 + 16 + 17) / 2.5
        and found["tokens_per_sample"] == 75 / 20
    )


def test_time_to_an_accuracy_is_that_of_the_first_weights_which_have_it():
    curve = [(4, 10.0, 0.5), (8, 11.0, 0.81), (12, 12.0, 0.79), (16, 13.0, 0.9)]
    assert peers.seconds_to(curve, 0.8) == 11.0
    assert peers.seconds_to(curve, 0.95) is None


def test_weights_that_were_kept_are_scored_on_held_out_problems(tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "EVAL_RESPONSES", 8)
    model = untrained_model(addition_tokenizer())
    model.save_pretrained(tmp_path / "model")
    addition_tokenizer().save_pretrained(tmp_path / "model")
    for folder, seconds in (("snapshots/step_12", 30.0), ("run/checkpoints/step_4", 20.0)):
        (tmp_path / folder).mkdir(parents=True)
        weights = {name: p.detach() + 0.1 * seconds for name, p in model.named_parameters()}
        save_file(weights, tmp_path / folder / "model.safetensors")
        os.utime(tmp_path / folder / "model.safetensors", (1000 + seconds, 1000 + seconds))
    curve = peers.accuracy_curve(tmp_path, NATURAL, str(tmp_path / "model"), started_at=1000.0)
    assert not list(tmp_path.glob("**/step_*/*.safetensors")), "they are large"
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 3.0
    expected = success_rate(Adder(), model, load_task("addition", 0).eval_problems(8))
    assert curve == [(4, 20.0, curve[0][2]), (12, 30.0, expected)]


def test_weights_are_kept_under_their_names(tmp_path):
    peers_ours.save_weights([("a", torch.ones(2)), ("b", torch.zeros(3))], tmp_path / "step_4")
    assert {
        name: w.tolist() for name, w in load_file(tmp_path / "step_4/model.safetensors").items()
    } == {
        "a": [1.0, 1.0],
        "b": [0.0, 0.0, 0.0],
    }


def test_ours_keeps_weights_and_nothing_else_where_a_run_would_save_a_checkpoint(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(Checkpoints, "_save", Checkpoints._save)  # so that it is put back
    monkeypatch.setattr(train_async, "train", lambda config, worker_main: None)
    monkeypatch.setattr(peers_ours, "steps_of", lambda run, samples: [])
    config = NATURAL.config(save_every=2, run_name="run")
    peers_ours.train(config)
    saves = object.__new__(Checkpoints)
    saves.policy = SimpleNamespace(named_full_parameters=lambda: [("a", torch.ones(2))])
    saves._asked_by, saves._step_ended, saves._longest_step_s = 0, 0.0, 0.0
    saves.node = SimpleNamespace(
        config=config,
        run=SimpleNamespace(checkpoint_path=lambda step: tmp_path / f"step_{step}"),
        clock=SimpleNamespace(enter=lambda state: None),
        cluster=SimpleNamespace(max_over_ranks=lambda wishes: wishes),
    )
    for step in range(1, 5):
        saves.save_if_due(step, None)
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*")) == [
        "step_2/model.safetensors",
        "step_4/model.safetensors",
    ]


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


def test_tokens_of_a_step_of_trl_are_read_from_its_log():
    assert peers_trl.trained_tokens({"completions/mean_length": 2.5}, samples=64) == 160
    assert (
        peers_trl.trained_tokens(
            {"completions/mean_length": 3, "batch/trained_tokens_per_step": 7}, 64
        )
        == 7
    )
    summary = {"train_runtime": 3.0, "batch/trained_tokens_per_step": 7.5}
    assert peers_trl.trained_tokens(summary, 64) is None, (
        "a line of it would count the last step twice"
    )


def test_trl_is_asked_and_rewarded_as_the_task_says():
    config = NATURAL.config(model=resolve_model("tiny", "addition"), seed=3)
    row, talk = peers_trl.problems(config, False)[0], peers_trl.problems(config, True)[0]
    problem = load_task("addition", 3).train_problem(0)
    assert row == {"prompt": problem.prompt, "answer": problem.answer, "task": "addition"}
    assert talk["prompt"] == [{"role": "user", "content": problem.prompt}]
    completions = [problem.answer, [{"role": "assistant", "content": "nothing"}]]
    assert peers_trl.task_reward(completions, [problem.answer] * 2, ["addition"] * 2) == [1.0, 0.0]
    assert peers_trl.task_reward(["It is 7."], ["7"], ["sums:one_digit"]) == [1.0]


def test_trl_is_asked_in_the_tokens_of_our_prompts_where_there_is_a_chat_template(tmp_path):
    tokenizer = addition_tokenizer()
    tokenizer.chat_template = "a ={% for message in messages %} b ={% endfor %}"
    tokenizer.save_pretrained(tmp_path)
    row = peers_trl.problems(SMOLLM2.config(model=str(tmp_path)), False)[0]
    task = load_task("sums:one_digit", 0)
    asked = task.encode_prompt(task.train_problem(0), tokenizer)
    assert tokenizer(row["prompt"])["input_ids"] == asked and len(asked) == 6
    assert row["answer"] == task.train_problem(0).answer


def test_the_small_language_models_job_is_the_same_for_trl():
    config = SMOLLM2.config(seed=2, steps=30, runs_dir="here")
    assert (config.model, config.task, config.share_prefix) == (
        "smollm2",
        "sums:one_digit",
        "prompt",
    )
    told = peers_trl.common_options(config)
    assert told["per_device_train_batch_size"] == 64 and told["num_generations"] == 8
    assert (told["learning_rate"], told["bf16"], told["seed"]) == (4e-5, True, 2)
    assert (told["max_completion_length"], told["max_steps"], told["output_dir"]) == (
        20,
        30,
        "here",
    )
    of_tiny = peers_trl.common_options(NATURAL.config())
    assert (of_tiny["learning_rate"], of_tiny["bf16"], of_tiny["per_device_train_batch_size"]) == (
        1e-3,
        False,
        256,
    )
    assert {work.config().model for work in (NATURAL, SHORT, LONG)} == {"tiny"}


def test_accuracy_is_the_share_of_right_responses_as_many_to_each_problem(monkeypatch):
    class Says:
        """A model that answers every second prompt right."""

        def generate(self, prompts, attention_mask, **limits):
            right = [p.answer for p in load_task("addition", 0).eval_problems(4)] * 3
            texts = [text if i % 2 else "a0" for i, text in enumerate(right)]
            written = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")[
                "input_ids"
            ]
            assert len(prompts) == 12 and (attention_mask[:, -1] == 1).all(), "padded on the left"
            return torch.cat([prompts, written], dim=1)

    tokenizer, task = addition_tokenizer(), load_task("addition", 0)
    problems = task.eval_problems(4)
    few = type(
        "Few",
        (),
        {"eval_problems": lambda _, n: list(problems), "encode_prompt": task.encode_prompt},
    )
    few.score = staticmethod(task.score)
    monkeypatch.setattr(peers, "load_task", lambda *_: few())
    monkeypatch.setattr(peers, "EVAL_RESPONSES", 14)
    assert peers.accuracy(Says(), NATURAL, tokenizer) == 0.5


def test_a_line_of_the_start_is_written_once_training_begins(tmp_path):
    recorder = peers_trl.Recorder(tmp_path, snapshot_every=0, samples=64)
    peers_trl.Start(recorder).on_train_begin(None, None, None)
    (line,) = read(tmp_path / "steps.jsonl")
    assert line["step"] == 0 and line["samples"] == 0 and abs(line["time"] - time.time()) < 10


def test_the_template_of_a_conversation_is_the_text_as_it_is(tmp_path):
    addition_tokenizer().save_pretrained(tmp_path)
    tokenizer = peers_trl.plain_tokenizer(str(tmp_path))
    prompt = load_task("addition", 0).train_problem(0).prompt
    messages = [{"role": "user", "content": prompt}]
    talk = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert talk == tokenizer.encode(prompt)


TO_ACCURACY = "s to held-out 0.8 (natural), 0.9 (smollm2)"


def cells(lines, name):
    """Heading -> cell of the row of an arm."""
    heading, row = (
        next(line for line in lines if what in line).strip("| ").split(" | ")
        for what in ("| n |", name)
    )
    return dict(zip(heading, row, strict=True))


def test_ours_is_compared_with_the_best_of_trl_and_both_with_the_machine():
    rates = {
        "ours α=1": 150.0,
        "ours α=2": 180.0,
        "TRL a": 30.0,
        "TRL b": 60.0,
        "training alone": 1200.0,
    }
    cost = {"cores": 2, "cpu_ms_per_sample": 10.0, "cores_busy": 1.8}
    turns = [(i, name) for i in range(3) for name in rates]
    records = [
        run_of(name, "natural", samples_per_s=rates[name], repeat=i, **cost) for i, name in turns
    ]
    lines = peers.summary(records)
    assert len(lines) == 4, "the best of each"
    ours, peer = cells(lines, "ours α=2"), cells(lines, "TRL b")
    assert (ours["÷ TRL"], ours["aim"], ours["reached"]) == ("3.00 [3.00–3.00]", "≥ 2 ÷ TRL", "yes")
    assert peer["÷ TRL"] == "–" and peer["samples/s"] == "60.0 [60.0–60.0]"
    assert ours["÷ limit of the machine"] == "0.90 [0.90–0.90]"
    assert {r["limit"] for r in peers.arms_of(records)["natural"]["ours α=2"]} == {200.0}
    long = [{**record, "work": "long"} for record in records]
    assert cells(peers.summary(long), "ours α=2")["reached"] == "no", (
        "there it is the limit that counts"
    )
    lines = peers.summary([*records, run_of("TRL c", "natural", samples_per_s=100.0)])
    assert (
        cells(lines, "ours α=2")["÷ TRL"] == "1.80 [1.80–1.80]"
        and cells(lines, "ours α=2")["reached"] == "no"
    )
    assert len(peers.summary([run_of("ours α=1")])) == 2, (
        "without TRL there is nothing to compare with"
    )


def test_runs_are_compared_with_the_one_whose_turn_was_beside_theirs():
    speeds = {"ours": (200.0, 100.0, 300.0), "TRL": (100.0, 50.0, 100.0)}
    records = [
        run_of(arm, samples_per_s=rate, repeat=i)
        for arm, rates in speeds.items()
        for i, rate in enumerate(rates)
    ]
    other = {"commit": "other", "samples_per_s": 1.0}
    records += [run_of("TRL", repeat=0, **other), run_of("ours", repeat=3)]
    (of_work,) = peers.ours(records).values()
    assert [r["over_peer"] for r in of_work] == [2.0, 2.0, 3.0]


def test_the_tables_have_medians_spread_and_what_was_not_reached(tmp_path):
    learns = {"work": "natural", "curve": [(4, 1.0, 0.5)]}
    records = [run_of("TRL a", samples_per_s=10.0, to_accuracy_s=50.0, **learns)]
    records += [run_of("TRL a", samples_per_s=12.0, to_accuracy_s=None, **learns)]
    records += [run_of("TRL a", samples_per_s=11.0, to_accuracy_s=70.0, up_s=30.0, **learns)]
    records += [run_of("ours α=1", cores_busy=1.5, cores=2), run_of("ours α=1")]
    _, natural, long = (text.splitlines() for text in peers.report(records))
    found = cells(natural, "TRL a")
    assert (found["natural"], found["n"], found["samples/s"]) == ("TRL a", "3", "11.0 [10.0–12.0]")
    assert found[TO_ACCURACY] == "70 [50–inf]" and found["CPU ms per sample"] == "–"
    assert found["s with the engine up"] == "40 [40–40], n = 1", (
        "older records do not say when it was up"
    )
    found = cells(long, "ours α=1")
    assert (found["cores busy"], found[TO_ACCURACY]) == ("1.50 [1.50–1.50], n = 1", "–")


def test_the_committed_records_give_a_table_of_each_work():
    records = read(harness.ROOT / "results" / "peers" / "peers.jsonl")
    arms = peers.arms_of(records)
    assert {"natural", "short", "long"} <= arms.keys() <= peers.AIMS.keys()
    for work, of_work in arms.items():
        ours, peer = peers.best(of_work, "ours"), peers.best(of_work, "TRL")
        ratio = f"{statistics.median(r['over_peer'] for r in peers.ours(records)[work]):.2f} ["
        rows = [line for line in peers.summary(records) if line.startswith(f"| {work} |")]
        assert len(rows) == 2 and ratio in rows[0] and {ours, peer} <= peers.WAYS.keys()


def test_a_run_that_fails_says_so_with_its_last_lines(tmp_path):
    command = [sys.executable, "-c", "print('something'); raise SystemExit(3)"]
    with pytest.raises(RuntimeError, match=r"(?s)ended with status 3; its last lines.*something"):
        peers.run(command, dict(os.environ), tmp_path / "log")


def test_a_run_that_hangs_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "TIMEOUT_S", 0.2)
    with pytest.raises(RuntimeError, match=r"ended with status none after 0\.2 s"):
        peers.run(["sleep", "60"], dict(os.environ), tmp_path / "log")


def test_memory_and_cpu_time_of_a_process_that_has_gone_are_nothing():
    at, cpu_s, memory = peers.look(os.getpid())
    assert cpu_s > 0.1 and memory > 1e7 and abs(at - time.time()) < 10
    assert peers.look(2**22 + 1)[1:] == (0.0, 0)


def test_cores_busy_are_those_between_two_moments_and_not_of_what_has_ended_by_the_second(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(peers, "POLL_S", 0.1)
    looks = peers.run([sys.executable, "-c", BUSY], dict(os.environ), tmp_path / "log")
    assert max(memory for *_, memory in looks) > 1e6
    (begun, _, _), (ended, used, _) = looks[0], looks[-1]
    assert used > 1.0 and peers.cores_busy(looks, begun, time.time()) == used / (ended - begun)
    looks = [(0.0, 0.0, 0), (2.0, 4.0, 0), (4.0, 7.0, 0), (6.0, 1.0, 0)]
    assert peers.cores_busy(looks, 1.0, 5.0) == (7.0 - 2.0) / 3.0, "at 6.0 most processes have gone"
    assert peers.cores_busy(looks, 4.5, 5.0) == 0.0, "nobody looked"


BUSY = """
import time
while time.process_time() < 1.8: pass
"""


@pytest.mark.parametrize("name", peers.WAYS)
def test_an_arm_has_the_environment_that_it_needs(name, tmp_path):
    way = peers.WAYS[name]
    found = peers.environment(way, tmp_path)
    assert way.is_peer == name.startswith("TRL") == (str(tmp_path) in found["PYTHONPATH"])
    assert found["OMP_NUM_THREADS"] == str(way.threads)


def test_a_run_is_told_its_work_and_what_it_says_is_kept(tmp_path, monkeypatch):
    """A script that stands in for ours: it writes what it was told as its steps."""
    (tmp_path / "scripts" / "bench").mkdir(parents=True)
    (tmp_path / "scripts" / "bench" / "peers_ours.py").write_text(STANDS_IN)
    monkeypatch.setattr(peers, "ROOT", tmp_path)
    monkeypatch.setattr(peers, "resolve_model", lambda *_: "no model")
    way = peers.Way(options={"num_rollout_workers": 3})
    found = peers.measure(way, SHORT, tmp_path, True, iter([7]), tmp_path)
    assert (found["work"], found["steps"], found["seed"], found["peer"]) == (
        "short",
        5,
        7,
        "trl==1.16.0",
    )
    assert found["start_s"] - found["up_s"] == pytest.approx(1.0), "the first line is the start"
    assert found["tokens_per_sample"] == 3.0 and found["samples_per_s"] == pytest.approx(256.0)
    assert "curve" not in found, "with forced lengths nothing is learned"


STANDS_IN = """
import json, pathlib, sys
told = json.loads(sys.argv[1])
assert "mode" not in told and told["work"] == "short" and told["seed"] == 7
tokens = 256 * told["num_rollout_workers"]
lines = [{"time": i, "samples": 256 * (i > 0), "tokens": tokens} for i in range(told["steps"] + 1)]
pathlib.Path(told["out"], "steps.jsonl").write_text("\\n".join(map(json.dumps, lines)))
"""


def test_an_installation_that_is_there_is_left_alone_and_one_that_fails_says_why(
    tmp_path, monkeypatch
):
    for pin in peers.PINS:
        (tmp_path / f"{pin.replace('==', '-')}.dist-info").mkdir()
    monkeypatch.setattr(sys, "executable", "/bin/false")
    peers.install(tmp_path)
    with pytest.raises(ValueError, match=r"pip install .* failed"):
        peers.install(tmp_path / "another")
