"""nano_async.py against the system: the same bound, the same gradient, the same rewards; and what a user meets."""

import math
import os
import random
import subprocess
import threading
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch.distributed as dist
import torch.multiprocessing as mp
from plain_trainer import make_step
from programs import ROOT, run_python, run_script, start_python, wait_until
from ranks import run_group
from real_job import run_job
from tiny_policy import VERSION, assert_same_gradient, grouped_sequences, load, make_config

from algos import LOSSES, make_loss
from data import TASKS
from scripts.runs import load as load_run


def import_nano():
    """Import nano_async.py without what it changes for the process of a run."""
    variables, strategy = dict(os.environ), mp.get_sharing_strategy()
    import nano_async

    os.environ.clear()
    os.environ.update(variables)
    mp.set_sharing_strategy(strategy)
    return nano_async


class Ended(Exception):
    """The trainer has ended."""


class RandomEngine:
    """Has what nano_async.serve calls of vLLM, and samples responses of random lengths."""

    llm_engine = property(lambda self: self)

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.missing = {}
        self.tokens = {}

    def get_tokenizer(self):
        return SimpleNamespace(chat_template=None)

    def collective_rpc(self, method, kwargs):
        assert method == "reload_weights"
        if kwargs["weights_iterator"] == ["end"]:
            raise Ended
        assert kwargs["weights_iterator"] == ["weights"]

    def add_request(self, name, prompt, parameters):
        self.missing[name] = self.rng.choice((1, 2, 3, 20))
        self.tokens[name] = []

    def step(self):
        outputs = []
        for name in list(self.missing):
            self.tokens[name].append(7)
            self.missing[name] -= 1
            logprobs = [{7: SimpleNamespace(logprob=-1.0)}] * len(self.tokens[name])
            text = SimpleNamespace(token_ids=self.tokens[name], logprobs=logprobs, text="a1")
            finished = self.missing[name] == 0
            outputs.append(SimpleNamespace(request_id=name, outputs=[text], finished=finished))
            if finished:
                del self.missing[name]
        return outputs


def serve_until_end(nano, pipe, *arguments):
    """Serve in a thread until the message that ends it, and close the pipe, as the end of a worker does."""
    with pipe, suppress(Ended):
        nano.serve(pipe, *arguments)


def sampled_staleness(nano, options, num_steps, rng):
    """Train on nothing for some steps, and return the staleness of each batch by its oldest token."""
    pipes = []
    task = SimpleNamespace(
        eval_problems=lambda count: [],
        train_problem=lambda index: SimpleNamespace(answer=""),
        encode_prompt=lambda problem, tokenizer: [1],
        score=lambda answer, response: 1.0,
    )

    for _ in range(options.workers):
        ours, theirs = mp.Pipe()
        arguments = (theirs, options, task, RandomEngine(rng.random()))
        threading.Thread(target=serve_until_end, args=(nano, *arguments), daemon=True).start()
        pipes.append(ours)
    rollout = nano.Rollout(options, pipes, num_held_out=0)
    staleness = []
    rollout.publish(0, ["weights"])
    for step in range(1, num_steps + 1):
        batch = rollout.take_batch(step - 1)
        assert [sample.group for sample in batch] == sorted(
            list(range((step - 1) * options.groups_per_step, step * options.groups_per_step))
            * options.group_size
        )
        staleness.append(step - 1 - min(min(sample.versions) for sample in batch))
        rollout.publish(step, ["weights"])
    for pipe in pipes:
        pipe.send((0, ["end"], range(0), 0))
    return staleness


def test_no_token_is_older_than_the_bound_and_some_are_as_old():
    """Random α, B, G, delay and workers, and responses of random lengths."""
    nano, rng = import_nano(), random.Random(0)
    at_bound = 0
    for _ in range(40):
        options = nano.Options(
            async_ratio=rng.choice((0, 0.3, 0.5, 1, 1.7, 2, 3)),
            publish_delay=rng.choice((0, 0, 1, 3)),
            groups_per_step=rng.randint(1, 6),
            group_size=rng.randint(1, 4),
            workers=rng.randint(1, 3),
        )
        staleness = sampled_staleness(nano, options, 12, rng)
        bound = math.ceil(options.async_ratio) + options.publish_delay
        assert max(staleness) <= bound, options
        at_bound += max(staleness) == bound
        if options.async_ratio == 0:
            assert staleness == [min(step, options.publish_delay) for step in range(12)]
    assert at_bound > 20


# The gradient


def samples_of(nano, sequences, rng):
    """Responses of nano_async.py that are some sequences of the system, with rewards."""
    samples = []
    for sequence in sequences:
        first = int(np.flatnonzero(sequence.loss_mask)[0])
        samples.append(
            nano.Sample(
                group=sequence.group_id,
                prompt=sequence.tokens[:first].tolist(),
                answer="",
                tokens=sequence.tokens[first:].tolist(),
                logprobs=sequence.behavior_logprobs[first:].tolist(),
                versions=sequence.policy_versions[first:].tolist(),
                reward=float(rng.integers(2)),
            )
        )
    return samples


def check_gradients(rank, model):
    """Compare the gradients of three losses with Policy.train_step's on the same sequences."""
    nano = import_nano()
    nano.RANK, nano.NUM_RANKS = rank, dist.get_world_size()
    sequences = grouped_sequences(4, 3)
    for algo in ("tis", "gspo", "m2po"):
        samples = samples_of(nano, sequences, np.random.default_rng(0))
        module = nano.load_model(model)
        nano.add_gradients(module, make_loss(algo), samples, VERSION, microbatch=4)
        actual = {name: weight.grad.full_tensor() for name, weight in module.named_parameters()}
        dealt = [
            replace(sequence, advantage=sample.advantage, reward=sample.reward)
            for sequence, sample in zip(sequences, samples, strict=True)
        ]
        policy = load(make_config(model, algo=algo))
        _, (expected,) = make_step(policy, [dealt], budget=60)
        assert_same_gradient(actual, expected)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_gradient_of_a_step_is_that_of_the_system(model, num_ranks):
    run_group(check_gradients, num_ranks, model)


def check_not_finite(rank, model):
    """A log-prob of NaN ends the run before it reaches the weights."""
    nano = import_nano()
    nano.RANK, nano.NUM_RANKS = rank, dist.get_world_size()
    samples = samples_of(nano, grouped_sequences(4, 3), np.random.default_rng(0))
    samples[0].logprobs[0] = math.nan
    published = []
    rollout = SimpleNamespace(
        publish=lambda version, weights: published.append(version),
        evaluate=dict,
        take_batch=lambda version: samples,
    )
    options = nano.Options(model=model, lr=1e-3, steps=1)
    with pytest.raises(SystemExit, match="the gradient is not finite"):
        nano.train(options, make_loss("tis"), rollout, None)
    assert published == [0]


def test_a_gradient_that_is_not_finite_ends_the_run(model):
    run_group(check_not_finite, 1, model)


# Runs


def run_nano(*words, **variables):
    return run_python("nano_async.py", *map(str, words), **variables)


MISTAKES = {
    "--algo nope": f"--algo must be one of {', '.join(LOSSES)}, got nope",
    "--algo-args clip_high=-1": "--algo-args clip_high=-1: Expected `float` >= 0.0",
    "--algo-args clip=1": "--algo-args clip=1: grpo takes clip_low, .*",
    "--task nope": f"--task must be one of {', '.join(TASKS)}, got nope",
    "--task gsm8k --data-path nowhere": "--data-path nowhere does not exist; .*",
    "--async-ratio -1": "--async-ratio must be at least 0, got -1.0",
    "--alpha -2": "--async-ratio must be at least 0, got -2.0",
    "--async-ratio nan": "--async-ratio must be at least 0, got nan",
    "--group-size 1": "--group-size must be at least 2, got 1",
    "--steps 0": "--steps must be at least 1, got 0",
    "--model data/tiny/sums": "--lr 0.001 is for the tiny model; choose one for data/tiny/sums",
    "--model tests --lr 1": ".*tests.*",
}


def test_a_wrong_option_ends_in_one_line():
    nano = import_nano()
    for words, line in MISTAKES.items():
        options = nano.tyro.cli(nano.Options, args=words.split())
        with pytest.raises(SystemExit, match=f"^error: {line}") as error:
            nano.main(options)
        print(error.value)


@pytest.mark.e2e
def test_a_delay_is_the_lag_a_killed_worker_ends_a_run_and_a_table_compares_both(
    tmp_path, monkeypatch, capsys
):
    """The first run is on two ranks. Nothing but a line for each step is printed, and no process is left."""
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone")
    small = ("--async-ratio=0", "--groups-per-step=4", "--group-size=4")
    logs = [tmp_path / "delayed.jsonl", tmp_path / "killed.jsonl"]
    words = [
        *torchrun,
        "nano_async.py",
        *small,
        "--steps=5",
        "--publish-delay=2",
        f"--log-file={logs[0]}",
    ]
    delayed = run_python(*words, OMP_NUM_THREADS="1")
    assert (delayed.returncode, delayed.stderr) == (0, ""), delayed.stderr
    start, *lines = delayed.stdout.splitlines()
    steps = [line.split()[:2] for line in lines]
    assert start.startswith("starting the engines") and steps == [
        ["step", str(step)] for step in range(1, 6)
    ]

    process = start_python("nano_async.py", *small, f"--log-file={logs[1]}", stderr=subprocess.PIPE)
    assert process.stdout.readline().startswith("starting the engines")
    assert [process.stdout.readline()[:6] for _ in range(2)] == ["step 1", "step 2"]
    children = psutil.Process(process.pid).children()
    (worker,) = [child for child in children if "spawn_main" in " ".join(child.cmdline())]
    worker.kill()
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (1, "error: a rollout worker was killed\n")
    wait_until(lambda: not any(child.is_running() for child in children))

    for path, delay in zip(logs, (2, 0), strict=True):
        metrics = load_run(path).metrics
        expected = [min(step, delay) for step in range(len(metrics))]
        assert metrics["staleness/max"].tolist() == expected
        assert metrics["staleness/mean"].tolist() == expected
    run_script(monkeypatch, "table.py", *logs, "--by", "publish_delay")
    rows = capsys.readouterr().out.splitlines()
    assert rows[0].startswith("| `publish_delay` | ")
    assert [row.split(" | ")[0] for row in rows[2:4]] == ["| 0", "| 2"]


@pytest.mark.e2e
@pytest.mark.slow
def test_a_prompt_that_is_too_long_ends_the_run_in_one_line():
    result = run_nano("--max-context", 8)
    assert result.returncode == 1 and result.stdout.startswith("starting the engines")
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: a rollout worker failed: ") and "length is 8 tokens" in line


LIKE_THE_SYSTEM = """
from types import SimpleNamespace

import numpy as np
import nano_async


def seed_of(name):
    seed, group, member = map(int, name.split(b"/"))
    entropy = [seed, int(group < 0), abs(group), member, 0]
    return int(np.random.SeedSequence(entropy).generate_state(1)[0]) >> 1


nano_async.zlib = SimpleNamespace(crc32=seed_of)
if __name__ == "__mp_main__":
    import vllm

    make_engine = vllm.LLM
    vllm.LLM = lambda *words, **options: make_engine(*words, max_num_seqs=1, **options)
if __name__ == "__main__":
    nano_async.main(nano_async.tyro.cli(nano_async.Options))
"""


@pytest.mark.e2e
@pytest.mark.slow
def test_with_alpha_0_rewards_are_those_of_the_system(tmp_path):
    """One response at a time: who shares a batch with it changes the last bit of a log-prob."""
    program, log = tmp_path / "like_the_system.py", tmp_path / "run.jsonl"
    program.write_text(LIKE_THE_SYSTEM)
    sizes = ["--steps=3", "--groups-per-step=6", "--group-size=4", "--seed=5"]
    result = run_python(
        program, *sizes, "--async-ratio=0", f"--log-file={log}", PYTHONPATH=str(ROOT)
    )
    assert (result.returncode, result.stderr) == (0, "")
    options = {"steps": 3, "groups_per_step": 6, "group_size": 4, "seed": 5, "async_ratio": 0}
    options |= {"max_running_requests": 1, "optim.warmup_steps": 0, "max_response_tokens": 56}
    job = run_job(tmp_path, **options)
    rewards = load_run(log).metrics["reward/mean"].tolist()
    assert rewards == job.values("reward/mean") and len(set(rewards)) > 1


@pytest.mark.study
@pytest.mark.parametrize("seed", range(3))
def test_addition_is_learned_in_80_steps(tmp_path, seed):
    result = run_nano("--seed", seed, "--steps", 80, "--log-file", tmp_path / "run.jsonl")
    assert result.returncode == 0, result.stderr
    accuracies = load_run(tmp_path / "run.jsonl").metrics["eval/accuracy"].dropna()
    assert accuracies.max() >= 0.9
    (tmp_path / "lines.txt").write_text(result.stdout)
