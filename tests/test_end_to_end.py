"""Whole jobs: real torchrun, real FSDP2, real vLLM, on the CPU. Each takes 20 to 40 s, most of it starting vLLM.

test_several_nodes.py has one of two nodes. Variants are slow if their parts have faster tests.
"""

import os
import re
import shlex
import signal
import tempfile

import chaos
import numpy as np
import pytest
from programs import run_python
from real_job import (
    ROOT,
    SMALL,
    TORCHRUN,
    Job,
    assert_every_group_is_consumed_once,
    assert_ledger_balances,
    assert_nothing_is_left,
    copy_without,
    launch,
    resume_job,
    run_job,
    start_job,
    without_times,
    words_of,
)
from safetensors.numpy import load_file
from tiny_policy import save_base_qwen3
from user_files import write_jsonl

from asyncrl.runlog.header import read_header
from asyncrl.runlog.manifest import find_newest_checkpoint
from asyncrl.weights.models import weights_sha256
from extras.planning.advice import advice_of
from scripts.lines import read

pytestmark = pytest.mark.e2e


def assert_time_is_accounted_for(job, resumed):
    """Every step's shares sum to 1, and the seconds since the step that it resumed from to its length; in both the
    workers decode."""
    metrics = job.metrics()
    # a short step may end without a report
    reported = [line for line in metrics if "worker_time/decoding" in line]
    for who, lines in (("trainer", metrics), ("worker", reported)):
        for line in lines:
            shares = [share for name, share in line.items() if name.startswith(f"{who}_time/")]
            assert sum(shares) == pytest.approx(1, abs=1e-6) and min(shares) >= 0
    assert len(reported) > len(metrics) / 2
    assert min(job.values("trainer_time/forward_backward")) > 0
    generated = sum(line["rollout/tokens_per_s"] * line["time/step_s"] for line in metrics)
    assert generated == pytest.approx(metrics[-1]["tokens/generated"])
    (trainer,) = job.events("trainer_time")
    in_steps = sum(job.values("time/step_s")[resumed:])
    assert in_steps < sum(trainer["seconds"].values()) < in_steps + 120
    (worker,), (*_, started) = job.events("worker_time"), job.events("worker_started")
    length_s = worker["until"] - started["time"]
    assert sum(worker["seconds"].values()) == pytest.approx(length_s, abs=0.1)
    assert 0 < worker["seconds"]["decoding"] < length_s


@pytest.fixture
def temporary(monkeypatch):
    """Make a folder for temporary files of a job alone, as tmp_path is too long for sockets."""
    with tempfile.TemporaryDirectory() as path:
        monkeypatch.setenv("TMPDIR", path)
        yield path


def test_with_alpha_2_the_reward_rises_within_the_bound_though_engine_and_trainer_are_killed_without_what_is_optional(
    tmp_path, temporary
):
    """Two rounds of tests/chaos.py, whose command makes twenty. The trainer is killed while it saves."""
    shared_memory = set(os.listdir("/dev/shm"))
    optional = [path.name for path in (ROOT / "extras").iterdir() if path.name[0] != "_"]
    root = copy_without(tmp_path, *optional)
    options = {"groups_per_step": 8, "group_size": 8, "async_ratio": 2}
    # So few at a time that the trainer waits for the engine, however busy the cores: an update then meets some.
    options |= {"max_running_requests": 6, "steps": 12, "eval_every": 6, "save_every": 1}
    run = chaos.Run(tmp_path, SMALL | options, root)
    run.running().wait_until(lambda: run.job.num_steps() >= 2)
    killed = chaos.hit(run, "engine ", signal.SIGKILL, 0.0)
    assert killed["outcome"] == "recovered"
    run.job.wait_until(lambda: len(run.job.events("worker_ready")) == 2)
    log = (run.job.run_path / "worker_0.log").read_text()
    assert log.count("RuntimeError: the engine is dead") == 1
    killed = chaos.hit(run, "trainer ", signal.SIGKILL, None)
    assert killed["outcome"] == "ended" and "exitcode: -9" in killed["cause"]
    left = set(os.listdir(temporary))
    job = run.running()
    assert job.wait() == 0, job.output()[-4000:]
    # A save goes on beside one step, and the next save waits for it. So the newest two steps may have none.
    (resumed,) = [event["step"] for event in job.events("run_resumed")]
    assert killed["step"] - 2 <= resumed < 12
    account = chaos.check_account(run)
    assert (account["starts"], account["restarts"]) == (2, 1)
    (died,) = job.events("worker_died")
    assert died["exit_code"] == 1
    rewards = job.values("reward/mean")
    assert np.mean(rewards[-4:]) > np.mean(rewards[:4])
    assert np.mean(job.values("staleness/mean")) > 0
    assert max(job.values("response/mixed_versions")) > 0, "no response lived through an update"
    assert max(job.values("mismatch/abs_max")) < 1e-4
    assert max(job.values("drift/k3")) > 1e-6
    assert {0, 12} <= {*job.values("eval/policy_version")}
    assert max(job.values("worker_time/restarting")) > 0
    assert_time_is_accounted_for(job, resumed)
    assert "worker 0  " in job.output() and "advice" not in job.output(), (
        "extras/planning is not there"
    )
    from scripts.runs import load  # pandas, which no other process of these tests needs

    assert "advice on α (now 2)" in advice_of(load(job.run_path))
    samples = read(job.run_path / "samples.jsonl")
    assert {line["step"] for line in samples} == set(range(1, 13)) and samples[0][
        "prompt"
    ].endswith("=")
    assert all(line["answer"] for line in samples) and len(samples) > 12, (
        "the best and the worst, if they differ"
    )
    assert len(job.events("trajectory")) >= 12 * 8 * 8
    # torch keeps its logs, and its cache of compiled code
    kept = ("torchelastic_", "torchinductor_")
    new = set(os.listdir(temporary)) - left
    assert [name for name in new if not name.startswith(kept)] == []
    assert_nothing_is_left([], shared_memory)


@pytest.mark.slow
def test_a_transport_that_brings_each_version_late_ends_the_run(tmp_path):
    """In bfloat16, in which a version changes log-probs less than rounding does."""
    options = {
        "dtype": "bfloat16",
        "lr": 1e-4,
        "steps": 12,
        "group_size": 32,
        "groups_per_step": 64,
    }
    words = [f"--runs-dir={tmp_path}", "--run-name=run", *words_of(SMALL | options)]
    job = launch(["tests/late_job.py", "3", *words], tmp_path / "run")
    assert job.wait() == 1
    assert "error: worker 0 has older weights than it says: at version " in job.output()
    assert job.num_steps() <= 8


@pytest.mark.slow
def test_publish_delay_3_with_alpha_0_is_exactly_3_steps_stale_after_the_first_3_and_replays_to_the_bit(
    tmp_path,
):
    options = {"publish_delay": 3, "on_update": "wait", "record": True, "eval_every": 7}
    job = run_job(tmp_path, steps=7, async_ratio=0, **options)
    assert job.values("staleness/max") == [0, 1, 2, 3, 3, 3, 3]
    assert job.values("staleness/mean") == [0, 1, 2, 3, 3, 3, 3]
    assert max(job.values("mismatch/abs_max")) < 1e-4
    assert_replay_is_the_run(job, tmp_path)


def test_centering_sees_the_engines_distribution_and_drifts_from_fresh_tokens_nowhere(tmp_path):
    """The tiny model's vocabulary has 139 tokens, so the recorded head is all of it."""
    options = {"top_logprobs": 139, "centering": True, "algo": "reinforce", "publish_delay": 1}
    job = run_job(tmp_path, steps=4, async_ratio=0, **options)
    assert job.values("staleness/max") == [0, 1, 1, 1]
    assert job.values("loss/head_mass") == pytest.approx([1] * 4, abs=1e-5)
    fresh, *stale = job.values("loss/drift_term")
    assert fresh < 1e-5 < 1e-4 < min(stale)


def assert_replay_is_the_run(job, tmp_path):
    """All that a replay logs, but for times, and its last weights are the run's; evaluate.py samples with them."""
    run_python("scripts/replay.py", job.run_path, "--run-name=replay")
    replayed = Job(None, tmp_path / "replay", None)
    for line, of_run in zip(replayed.metrics(), job.metrics(), strict=True):
        skipped = ("time/", "trainer_time/", "tokens/generated")
        names = [name for name in line if not name.startswith(skipped)]
        assert {name: line[name] for name in names} == {name: of_run[name] for name in names}
        assert "loss/grad_norm" in names and "drift/k3" in names
    last = "checkpoints/step_7"
    assert weights_sha256(replayed.run_path / last) == weights_sha256(job.run_path / last)
    evaluated = run_python("scripts/evaluate.py", replayed.run_path, "--eval-problems=8")
    assert "pass@1" in evaluated.stdout, evaluated.stderr


@pytest.mark.slow
def test_with_alpha_0_two_ranks_and_two_workers_train_exactly_on_policy_until_they_are_interrupted(
    tmp_path,
):
    shared_memory = set(os.listdir("/dev/shm"))
    job = start_job(
        tmp_path,
        num_ranks=2,
        steps=100_000,
        async_ratio=0,
        num_rollout_workers=2,
        minibatches=2,
        kl_coef=0.01,
        scheduling="batch",
        replicate_prompts=False,
        share_prefix="tree",
    )
    job.wait_until(lambda: job.num_steps() >= 4)
    processes = job.descendants()
    os.killpg(job.process.pid, signal.SIGINT)  # as a terminal does: torchrun passes it on
    assert job.wait(timeout_s=60) != 0
    assert_nothing_is_left(processes, shared_memory)
    step, metrics = job.num_steps(), job.metrics()
    assert find_newest_checkpoint(job.run_path).step == step, "the step ends and is saved"
    how = f"after step {step}, which is saved; continue from step {step}: "
    assert f"stopped by SIGINT {how}" in job.output()
    assert job.values("staleness/max") == [0] * step
    saved = job.values("tokens/saved_share")
    assert np.mean(saved) > 0.2 and min(saved) > 0.1, (
        "how a step's groups are cut into two updates is drawn"
    )
    assert {event["worker"] for event in job.events("trajectory")} == {0, 1}
    assert 0 < metrics[0]["drift/k3"] < 1e-2, (
        "only the second minibatch meets a policy that has moved"
    )
    assert_ledger_balances(metrics)


@pytest.mark.slow
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
    assert 1 <= max(job.values("staleness/max")) <= 4
    assert max(job.values("response/inherited_share")) > 0
    assert metrics[-1]["ledger/groups_dropped_filtered"] > 0
    assert {*job.values("reward/zero_variance_groups")} == {0}
    trained = [
        event for event in job.events("trajectory") if event["finish_reason"] in ("stop", "length")
    ]
    members = [(event["group"], event["member"]) for event in trained]
    assert len(members) == len(set(members))
    assert_ledger_balances(metrics)


@pytest.mark.study
def test_with_alpha_0_a_killed_run_goes_on_to_the_bit_of_the_unbroken_one(tmp_path):
    # One request at a time: else which of them share a batch depends on time, and with it the last bit of a log-prob.
    options = {"steps": 9, "save_every": 3, "eval_every": 3, "eval_problems": 8, "async_ratio": 0}
    unbroken, killed = (
        start_job(tmp_path / name, max_running_requests=1, **options)
        for name in ("unbroken", "killed")
    )
    killed.wait_until(lambda: killed.has_saved() and killed.num_steps() >= 4)
    killed.kill()
    job = resume_job(killed)
    assert job.wait() == 0 == unbroken.wait(), job.output()[-3000:]
    (resumed,) = job.events("run_resumed")
    assert resumed["step"] in (3, 6)
    lines, expected = ([without_times(line) for line in run.metrics()] for run in (job, unbroken))
    assert lines == expected
    assert job.evaluations() == unbroken.evaluations() and job.evaluations().keys() == {0, 3, 6, 9}
    last = "checkpoints/step_9"
    assert weights_sha256(unbroken.run_path / last) == weights_sha256(job.run_path / last)
    assert_every_group_is_consumed_once(job, 9, 8)


@pytest.mark.slow
def test_the_first_command_for_eight_gpus_starts_and_changes_the_weights_by_its_learning_rate(
    tmp_path,
):
    """As README has it, on the CPU, with a small random model of that family in the place of the weights."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8").replace("\\\n", " ")
    (line,) = re.findall(r"^\S*torchrun .*--model Qwen/Qwen3-8B-Base.*", readme, re.MULTILINE)
    _, *words = shlex.split(line.partition("  # ")[0])
    model = save_base_qwen3(str(tmp_path / "model"))
    words[words.index("Qwen/Qwen3-8B-Base")] = model
    rows = [
        {"question": f"{i} + 7 - {i} = ?", "answer": "The result is 7.\n#### 7"} for i in range(200)
    ]
    data_path = write_jsonl(tmp_path / "rows.jsonl", rows)
    words += [f"--runs-dir={tmp_path}", "--run-name=run", "--steps=3", f"--data-path={data_path}"]
    job = launch([*TORCHRUN, "--standalone", *words], tmp_path / "run")
    assert job.wait(1500) == 0, job.output()[-4000:]
    before = load_file(f"{model}/model.safetensors")
    after = load_file(job.run_path / "checkpoints/step_3/model.safetensors")
    size = sum(weight.size for weight in before.values())
    assert f"\nlr: 0.001, the default for {size:,} parameters\n" in f"\n{job.output()}"
    assert f"dtype: float32, the default for {size:,} parameters on a CPU\n" in job.output()
    ends = "a response ends at '<|endoftext|>' (0: tokenizer, generation_config.json, config.json), '<|im_end|>' (2: "
    assert ends in job.output()
    lrs = job.values("loss/lr")
    assert lrs == pytest.approx([0.2e-3, 0.4e-3, 0.6e-3])
    assert read_header(job.run_path)["config"]["lr"] == 0.001
    largest = max(abs(after[name] - weight).max() for name, weight in before.items())
    assert 0 < largest < 1.1 * sum(lrs), "AdamW moves no weight by more than its rate"
    assert max(job.values("drift/k3")) < 0.02 and max(job.values("staleness/max")) <= 2
    assert max(job.values("loss/grad_norm")) > 0
