"""Whole jobs: real torchrun, real FSDP2, real vLLM, on the CPU. Each takes 20 to 40 s, most of it starting vLLM."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import numpy as np
import pytest
from real_job import ROOT, Job, assert_nothing_is_left, run_job, start_job
from tiny_policy import save_byte_llama, save_unservable_model

from controller.ledger import DROP_REASONS
from data.models import resolve_model
from records.batches import weights_sha256

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module", autouse=True)
def tiny_model():
    """Made before the clock of any job starts."""
    for task in ("frozen_lake", "guess_number"):
        resolve_model("tiny", task)
    return resolve_model("tiny", "addition")


def assert_ledger_balances(metrics):
    for line in metrics:
        for unit, source in (("groups", "issued"), ("tokens", "generated")):
            dropped = sum(line[f"ledger/{unit}_dropped_{reason}"] for reason in DROP_REASONS)
            parts = line[f"ledger/{unit}_consumed"] + dropped + line[f"ledger/{unit}_resident"]
            assert line[f"ledger/{unit}_{source}"] == parts


def assert_time_is_accounted_for(job):
    """Every step's shares sum to 1, and the seconds of the run to its length; in both the workers decode."""
    metrics = job.metrics()
    reported = [line for line in metrics if "worker_time/decoding" in line]  # a short step may end without a report
    for who, lines in (("trainer", metrics), ("worker", reported)):
        for line in lines:
            shares = [share for name, share in line.items() if name.startswith(f"{who}_time/")]
            assert sum(shares) == pytest.approx(1, abs=1e-6) and min(shares) >= 0
    assert len(reported) > len(metrics) / 2 and sum(line["worker_time/decoding"] for line in reported) > 0
    assert min(line["trainer_time/forward_backward"] for line in metrics) > 0
    (trainer,) = job.events("trainer_time")
    in_steps = sum(line["time/step_s"] for line in metrics)
    assert in_steps < sum(trainer["seconds"].values()) < in_steps + 120
    for worker in job.events("worker_time"):
        (started,) = [e for e in job.events("worker_started") if e["worker"] == worker["worker"]]
        assert sum(worker["seconds"].values()) == pytest.approx(worker["until"] - started["time"], abs=0.1)
        assert 0 < worker["seconds"]["decoding"] < worker["until"] - started["time"]


def test_with_alpha_2_the_reward_rises_within_the_bound_and_engine_and_trainer_agree(tmp_path):
    job = run_job(tmp_path, steps=16, groups_per_step=16, group_size=8, async_ratio=2, eval_every=8, save_every=8)
    metrics = job.metrics()
    assert [line["step"] for line in metrics] == list(range(1, 17))
    assert np.mean([line["reward/mean"] for line in metrics[-4:]]) > np.mean(
        [line["reward/mean"] for line in metrics[:4]]
    )
    assert max(line["staleness/max"] for line in metrics) <= 2
    assert np.mean([line["staleness/mean"] for line in metrics]) > 0
    assert any(line["response/mixed_versions"] > 0 for line in metrics), "no response lived through an update"
    assert max(line["mismatch/abs_max"] for line in metrics if "mismatch/abs_max" in line) < 1e-4
    assert max(line["drift/k3"] for line in metrics) > 1e-6
    evaluated = {line["eval/policy_version"] for line in metrics if "eval/accuracy" in line}
    assert {0, 16} <= evaluated
    assert_ledger_balances(metrics)
    assert_time_is_accounted_for(job)
    assert "advice on α (now 2)" in job.output() and "worker 0  " in job.output()
    assert_checkpoint_serves(job.run_path / "checkpoints" / "step_16")
    run = json.loads((job.run_path / "run.json").read_text())
    assert run["config"]["async_ratio"] == 2 and run["packages"]["torch"]
    samples = [json.loads(line) for line in (job.run_path / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 16 and samples[0]["prompt"].endswith("=")
    assert len(job.events("trajectory")) >= 16 * 16 * 8


def assert_checkpoint_serves(path):
    """transformers loads what was saved, and it differs from what training began with."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    trained = AutoModelForCausalLM.from_pretrained(path)
    first = AutoModelForCausalLM.from_pretrained(resolve_model("tiny", "addition"))
    assert AutoTokenizer.from_pretrained(path).eos_token_id is not None
    assert any(not a.equal(b) for a, b in zip(trained.parameters(), first.parameters(), strict=True))


def test_with_alpha_0_two_ranks_and_two_workers_train_exactly_on_policy(tmp_path):
    job = run_job(
        tmp_path,
        num_ranks=2,
        steps=4,
        async_ratio=0,
        num_rollout_workers=2,
        minibatches=2,
        kl_coef=0.01,
        scheduling="batch",
        replicate_prompts=False,
        share_prefix=True,
    )
    metrics = job.metrics()
    assert [line["staleness/max"] for line in metrics] == [0] * 4
    saved = [line["tokens/saved_share"] for line in metrics]
    assert np.mean(saved) > 0.2 and min(saved) > 0.1, "how a step's groups are cut into two updates is drawn"
    assert {event["worker"] for event in job.events("trajectory")} == {0, 1}
    assert 0 < metrics[0]["drift/k3"] < 1e-2, "only the second minibatch meets a policy that has moved"
    assert_ledger_balances(metrics)


def test_publish_delay_3_with_alpha_0_is_exactly_3_steps_stale_after_the_first_3_and_replays_to_the_bit(tmp_path):
    job = run_job(tmp_path, steps=7, async_ratio=0, publish_delay=3, on_update="wait", record=True)
    metrics = job.metrics()
    assert [line["staleness/max"] for line in metrics] == [0, 1, 2, 3, 3, 3, 3]
    assert [line["staleness/mean"] for line in metrics] == [0, 1, 2, 3, 3, 3, 3]
    assert max(line["mismatch/abs_max"] for line in metrics if "mismatch/abs_max" in line) < 1e-4
    assert_replay_is_the_run(job, tmp_path)


def assert_replay_is_the_run(job, tmp_path):
    """scripts/replay.py without an option: all that it logs, but for times, and the last weights are the run's."""
    command = [sys.executable, "scripts/replay.py", job.run_path, "--run-name=replay"]
    subprocess.run(command, cwd=ROOT, check=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, timeout=120)
    replayed = Job(None, tmp_path / "replay", None)
    for line, of_run in zip(replayed.metrics(), job.metrics(), strict=True):
        skipped = ("time/", "trainer_time/", "tokens/generated")
        names = [name for name in line if not name.startswith(skipped)]
        assert {name: line[name] for name in names} == {name: of_run[name] for name in names}
        assert "loss/grad_norm" in names and "drift/k3" in names
    last = "checkpoints/step_7"
    assert weights_sha256(replayed.run_path / last) == weights_sha256(job.run_path / last)


def test_an_environment_of_several_turns_is_learnt_within_the_bound_with_spare_members_and_failing_steps(tmp_path):
    job = run_job(
        tmp_path,
        task="frozen_lake",
        steps=8,
        max_prompt_tokens=64,
        max_response_tokens=128,
        stale_policy="drop",
        on_update="resume",
        extra_members=1,
        latency="normal:1,1 fail:0.005 scale:0.01",
        env_timeout_s=1,
        lr=1e-3,
        eval_every=8,
    )
    metrics = job.metrics()
    assert max(line["staleness/max"] for line in metrics) <= 1
    assert all(line["response/turns_mean"] > 1 for line in metrics)
    assert metrics[-1]["ledger/tokens_dropped_aborted"] > 0, "a spare member that was not needed"
    assert max(line["mismatch/abs_max"] for line in metrics if "mismatch/abs_max" in line) < 1e-4
    assert max(line["drift/k3"] for line in metrics if line["staleness/max"] == 0) < 1e-6, "what was sampled is trained"
    assert metrics[-1]["eval/problems"] == 32
    assert_ledger_balances(metrics)


def test_over_sampling_trains_every_response_once_and_none_beyond_the_bound(tmp_path):
    job = run_job(
        tmp_path,
        steps=8,
        async_ratio=0,
        over_sampling=2,
        on_update="resume",
        drop_zero_variance=True,
    )
    metrics = job.metrics()
    assert 1 <= max(line["staleness/max"] for line in metrics) <= 4
    assert any(line["response/inherited_share"] > 0 for line in metrics)
    assert metrics[-1]["ledger/groups_dropped_filtered"] > 0
    assert all(line["reward/zero_variance_groups"] == 0 for line in metrics)
    trained = [event for event in job.events("trajectory") if event["finish_reason"] in ("stop", "length")]
    members = [(event["group"], event["member"]) for event in trained]
    assert len(members) == len(set(members))
    assert_ledger_balances(metrics)


def test_a_barrier_over_two_workers_holds_back_every_turn_and_extra_groups_are_given_up_for_full_batches(tmp_path):
    job = run_job(
        tmp_path,
        task="guess_number",
        steps=5,
        async_ratio=0,
        max_prompt_tokens=4,
        max_response_tokens=24,
        scheduling="lockstep",
        latency="normal:1,1 scale:0.01",
        drop_zero_variance=True,
        extra_groups=4,
        num_rollout_workers=2,
        eval_every=5,
    )
    metrics = job.metrics()
    assert [line["staleness/max"] for line in metrics] == [0] * 5
    assert {event["worker"] for event in job.events("trajectory")} == {0, 1}
    assert all(line["response/turns_mean"] > 1 for line in metrics)
    assert all(line["reward/zero_variance_groups"] == 0 for line in metrics)
    assert metrics[-1]["ledger/groups_dropped_filtered"] > 0
    assert metrics[-1]["ledger/groups_dropped_aborted"] > 0, "an extra group that was given up"
    assert metrics[-1]["eval/problems"] == 32
    assert_ledger_balances(metrics)


def test_the_gate_bounds_how_much_runs_ahead_and_not_how_old_a_straggler_is(tmp_path):
    job = run_job(
        tmp_path,
        task="frozen_lake",
        steps=12,
        max_prompt_tokens=8,
        max_response_tokens=64,
        stale_policy="gate",
        async_ratio=1,
        latency="lognormal:0,1.8 scale:0.01",
    )
    metrics = job.metrics()
    assert max(line["staleness/max"] for line in metrics) > 1, "the ledger's bound at this async ratio"
    for line in metrics:
        assert line["ledger/groups_issued"] <= (line["step"] + 1) * 8 + 8, "AReaL: floor((N - 1) / B) <= version + 1"
    assert_ledger_balances(metrics)


def test_any_causal_lm_trains_on_a_reasoning_gym_task_through_its_chat_template(tmp_path):
    job = run_job(
        tmp_path,
        model=save_byte_llama(str(tmp_path / "model")),
        task="reasoning_gym:basic_arithmetic",
        steps=3,
        on_update="recompute",
        stale_policy="drop",
        algo="tis",
        advantage="rloo",
        temperature=0.8,
        top_p=0.95,
        max_prompt_tokens=400,
        max_response_tokens=16,
        eval_every=2,
        lora_rank=4,
    )
    assert (job.run_path / "checkpoints" / "step_3" / "adapter" / "adapter_model.safetensors").exists()
    metrics = job.metrics()
    assert max(line["mismatch/abs_max"] for line in metrics if "mismatch/abs_max" in line) < 1e-4
    assert max(line["drift/k3"] for line in metrics if line["staleness/max"] == 0) < 1e-6
    sample = json.loads((job.run_path / "samples.jsonl").read_text().splitlines()[0])
    assert sample["prompt"].startswith("user: ") and sample["prompt"].endswith("assistant: ")
    assert_ledger_balances(metrics)


def test_a_run_survives_that_its_engine_is_killed_updating_and_starting_and_then_its_worker(tmp_path, monkeypatch):
    shared_memory, temporary = set(os.listdir("/dev/shm")), tempfile.mkdtemp()  # tmp_path is too long for sockets
    monkeypatch.setenv("TMPDIR", temporary)
    job = start_job(tmp_path, steps=30, async_ratio=1, eval_every=10)
    job.wait_until(lambda: job.num_steps() >= 3)
    before, titles = job.descendants(), job.titles()
    assert {"rollout 0", "rewards 0", "engine 0::EngineCore"} < titles.keys()
    assert any(title.startswith("trainer 0: train_async.py --runs-dir=") for title in titles)
    kill_in_an_update(job)
    job.wait_until(lambda: job.engine() is not None and len(job.events("worker_started")) == 2)
    job.engine().kill()
    num_steps = job.num_steps()
    job.wait_until(lambda: job.num_steps() >= num_steps + 3)
    os.kill(job.titles()["rollout 0"], signal.SIGKILL)
    assert job.wait() == 0, job.output()[-4000:]
    metrics = job.metrics()
    assert [death["exit_code"] for death in job.events("worker_died")] == [1, 1, -signal.SIGKILL]
    assert "killed by SIGKILL" in job.output()
    assert metrics[-1]["rollout/restarts"] == 3 and len(metrics) == 30
    assert max(line["staleness/max"] for line in metrics) <= 1
    assert (job.run_path / "worker_0.log").read_text().count("RuntimeError: the engine is dead") == 1
    assert_ledger_balances(metrics)
    assert_nothing_is_left(before, shared_memory)
    assert "leaked semaphore" not in job.output(), "the last word of a good run"
    assert [name for name in os.listdir(temporary) if not name.startswith("torchelastic_")] == []
    shutil.rmtree(temporary)


def kill_in_an_update(job):
    """Freeze the engine until a step that ends meanwhile shows that the worker waits for it to load new weights."""
    engine = job.engine()
    for _ in range(20):
        engine.suspend()
        time.sleep(1)
        if job.num_steps() > max(event["version"] for event in job.events("update")):
            return engine.kill()
        engine.resume()
        time.sleep(0.05)
    raise AssertionError("the trainer never ended a step without the engine")


@pytest.mark.parametrize(("number", "num_steps"), [(signal.SIGINT, 2), (signal.SIGTERM, 0)])
def test_an_interrupted_run_leaves_nothing_behind_but_its_records(tmp_path, number, num_steps):
    shared_memory = set(os.listdir("/dev/shm"))
    job = start_job(tmp_path, steps=100_000, num_ranks=2)
    events = job.run_path / "events.jsonl"
    job.wait_until(lambda: events.exists() and job.events("worker_started") and job.num_steps() >= num_steps)
    processes = job.descendants()
    os.killpg(job.process.pid, number)  # as a terminal does: torchrun passes it on to the ranks
    assert job.wait(timeout_s=60) != 0
    assert f"error: stopped by {number.name}" in job.output()
    assert_nothing_is_left(processes, shared_memory)
    (ended,) = job.events("run_ended")
    assert ended["status"] == "ended early" and f"stopped by {number.name}" in ended["reason"]
    assert [line["step"] for line in job.metrics()] == list(range(1, job.num_steps() + 1))


def test_a_worker_whose_engine_cannot_sample_ends_the_run_within_a_minute_with_its_log(tmp_path):
    model = save_unservable_model(str(tmp_path / "model"))
    job = start_job(tmp_path, steps=2, model=model)
    assert job.wait(timeout_s=60) != 0
    assert "error: rollout worker 0 was up, and died before any response came back" in job.output()
    assert "  | " in job.output() and "head_dim=20" in job.output()
