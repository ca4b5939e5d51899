"""When a run is saved, what is left of it whatever happens meanwhile, and how signals and a limit of time end it."""

import dataclasses
import io
import json
import os
import queue
import random
import signal
import sys
import threading
import time
import traceback
from contextlib import ExitStack, nullcontext, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_policy import load, random_sequences, weights_of
from user_files import contents

from asyncrl.cluster.cluster import Cluster
from asyncrl.cluster.node_watch import NodeWatch
from asyncrl.cluster.processes import STOP_SIGNALS, CannotContinue, Interrupted
from asyncrl.config import Config
from asyncrl.job import checkpoints as module
from asyncrl.job.checkpoints import Checkpoints
from asyncrl.job.node import NobodySamples
from asyncrl.job.probe import Probe
from asyncrl.job.publisher import LeadingPublisher
from asyncrl.messages import Probed
from asyncrl.runlog.manifest import Checkpoint, find_newest_checkpoint, list_checkpoints
from asyncrl.runlog.run_directory import RunDirectory
from asyncrl.runlog.time_ledger import TimeLedger
from asyncrl.trainer.checkpoint_writer import CheckpointWriter
from asyncrl.trainer.splitting import distribute

PUBLISHER = SimpleNamespace(held_back_to_save={})
ENGINES = {
    "connect_workers": lambda specs: None,
    "share_cores": lambda module: None,
    "controller_state": None,
}
"""What a leader has of engines that take no weights."""


@dataclasses.dataclass
class Rollout:
    """A controller of which there is only what is saved."""

    ticket_source: ClassVar = SimpleNamespace(prompts=SimpleNamespace(digest="of the rows"))

    def snapshot(self, measure_records):
        return self, measure_records()


@pytest.fixture
def start(tmp_path, model, one_rank):
    """Checkpoints of a run without rollout, by its options; `resumed` is what it continues from."""

    def make(resumed=None, **options):
        defaults = {"run_name": "one", "algo": "reinforce", "lr": 0.01}
        config = Config(model=model, runs_dir=str(tmp_path), **defaults, **options)
        saved = resumed.probe_of(0) if resumed else {"tokens": [[1, 2, 3]], "scores": []}
        rank = SimpleNamespace(
            config=config,
            cluster=Cluster(),
            run=RunDirectory(config, resume_point=resumed and resumed.resume_point(0, 1)),
            controller=Rollout(),
            checkpoint=resumed,
            on_end=ExitStack(),
            device=torch.device("cpu"),
            clock=TimeLedger(),
            probe=Probe(config, saved),
            watch=NodeWatch(Cluster(), lambda: "no stacks"),
        )
        rank.run.record_event("worker_ready", worker=0)
        try:
            checkpoints = Checkpoints(rank, load(config))
            checkpoints.restore_policy_and_run_folder()
            checkpoints.allocate_copies()
        except ValueError as error:
            rank.run.close(error)
            raise
        return checkpoints

    return make


def folder_of(checkpoints: Checkpoints) -> Path:
    return checkpoints.rank.run.path / "checkpoints"


def names(checkpoints: Checkpoints) -> list[str]:
    return sorted(path.name for path in folder_of(checkpoints).iterdir())


def train(policy, step) -> None:
    policy.train_step(distribute([random_sequences(4, seed=step)], 1, 60)[0], policy_version=12)


def save(checkpoints: Checkpoints, *steps: int) -> None:
    for step in steps:
        checkpoints.save_if_due(step, PUBLISHER)
    checkpoints.writer.wait()


def newest(checkpoints: Checkpoints) -> Checkpoint:
    return find_newest_checkpoint(checkpoints.rank.run.path)


# What is saved


def test_a_run_says_at_its_start_which_tensors_its_checkpoints_will_lack(
    model, start, capsys, monkeypatch
):
    checkpoints = start(steps=1)
    rank, policy = checkpoints.rank, checkpoints.policy
    vars(rank).update(ENGINES)
    LeadingPublisher(rank, policy)
    assert "warning" not in capsys.readouterr().out
    missing, *specs = policy.sent_specs()
    renamed = dataclasses.replace(missing, name="renamed")
    monkeypatch.setattr(policy, "sent_specs", lambda: [renamed, *specs])
    LeadingPublisher(rank, policy)
    line = f"checkpoints will lack {missing.name}; will have, and it lacks, renamed\n"
    assert f"warning: beside --model {model}, {line}" in capsys.readouterr().out


def test_the_thread_that_saves_uses_no_gpu_but_that_of_its_rank(start, monkeypatch):
    """The thread chooses its GPU first, so whatever torch does later makes no context on GPU 0."""
    calls = []
    stream = SimpleNamespace(device_type="cuda", synchronize=lambda: calls.append("synchronize"))
    checkpoints = start(save_every=1, steps=9)
    checkpoints.writer.device = torch.device("cuda", 1)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.current_stream", lambda: stream)
    monkeypatch.setattr("torch.cuda.stream", nullcontext)
    monkeypatch.setattr(
        "torch.cuda.set_device",
        lambda device: calls.append(
            (threading.current_thread() is threading.main_thread(), device)
        ),
    )
    save(checkpoints, 1)
    assert calls[0] == (False, torch.device("cuda", 1)) and set(calls[1:]) <= {"synchronize"}
    assert names(checkpoints) == ["step_1"]


def test_a_checkpoint_that_does_not_fit_the_model_leaves_the_run_as_it_was(start):
    checkpoints = start(save_every=2, steps=4, lora_rank=2)
    run = checkpoints.rank.run
    for step in (1, 2, 3):
        run.log_metrics({"step": step})
        save(checkpoints, step)
    run.close()
    (folder_of(checkpoints) / "step_3.tmp").write_text("half written")
    before, found = contents(run.path), newest(checkpoints)
    with pytest.raises(ValueError, match="it is of another model"):
        start(resumed=found, lora_rank=3)
    assert contents(run.path) == before
    accepted = start(resumed=found, lora_rank=2)
    with pytest.raises(ValueError, match="one is written by a run that has not ended"):
        start(resumed=found, lora_rank=2)
    accepted.rank.run.close()
    assert accepted.rank.run.last_metrics() == {"step": 2} and names(accepted) == ["step_2"]
    assert accepted.rank.run.run_id == run.run_id


def delay_writing(checkpoints: Checkpoints, wait) -> None:
    """Have the thread that writes weights do this first."""
    write = checkpoints.writer.weights.write

    def write_later(*arguments):
        wait()
        write(*arguments)

    checkpoints.writer.weights.write = write_later


def is_waited_for() -> bool:
    """Whether the main thread waits for the thread that writes."""
    frame = sys._current_frames()[threading.main_thread().ident]
    waits = (CheckpointWriter.wait.__code__, CheckpointWriter.close.__code__)
    return any(waiting.f_code in waits for waiting, _ in traceback.walk_stack(frame))


def test_versions_that_are_held_back_are_held_back_after_a_resume(start):
    checkpoints = start(steps=3, publish_delay=3, async_ratio=0.0)
    policy, probe = checkpoints.policy, checkpoints.rank.probe
    held = {}
    for version in (1, 2):
        specs = policy.sent_specs()
        held[version] = [(s.name, torch.full(s.shape, float(version))) for s in specs]
        probe.score(policy, version)
    checkpoints.save_if_due(3, SimpleNamespace(held_back_to_save=held))
    checkpoints.writer.wait()
    checkpoints.rank.run.close()
    found = newest(checkpoints)
    manifest = json.loads((found.resume_folder / "manifest.json").read_text())["manifest"]
    files = {str(path.relative_to(found.path)) for path in contents(found.path)}
    assert files == manifest["files"].keys() | {"resume/manifest.json"}
    rank = start(resumed=found, publish_delay=3, steps=9).rank
    scores = {v: probe._scores[v].logprobs - np.float32(0.5) for v in held}
    nothing = np.zeros((2, 1), np.float32)
    engines = {v: {0: Probed(v, (scores[v],), (nothing,))} for v in held}
    mismatches = [(seen.version, seen.abs_mean) for seen in rank.probe.compare(engines)]
    assert mismatches == [(version, pytest.approx(0.5)) for version in (1, 2)]
    vars(rank).update(ENGINES)
    publisher = LeadingPublisher(rank, policy)
    version, published = publisher._choose_weights(3, policy.named_full_parameters())
    assert version == 1
    for (name, weight), (sent_name, expected) in zip(published, held[1], strict=True):
        assert name == sent_name and weight.equal(expected)
    # the run was to end with that step, and continues with more
    rank.config = dataclasses.replace(rank.config, steps=3)
    publisher = LeadingPublisher(rank, policy)
    assert publisher._choose_weights(3, policy.named_full_parameters())[0] == 3
    rank.checkpoint = dataclasses.replace(found, held_back=list(publisher.held_back_to_save))
    rank.config = dataclasses.replace(rank.config, steps=9)
    publisher = LeadingPublisher(rank, policy)
    versions = [
        publisher._choose_weights(step, policy.named_full_parameters())[0] for step in range(3, 9)
    ]
    assert versions == [3, 3, 3, 3, 4, 5], "a worker never goes back to older weights"
    rank.config = dataclasses.replace(rank.config, eval_every=1)
    rank.controller_state, rank.first_version = SimpleNamespace(published_version=3), 3
    publisher = LeadingPublisher(rank, policy)
    assert [publisher._evaluates(step, v) for step, v in ((4, 3), (7, 4))] == [False, True]
    rank.controller_state = None
    publisher = LeadingPublisher(rank, policy)
    assert publisher._evaluates(4, 3)


@pytest.mark.parametrize("options", [{}, {"lora_rank": 2}])
def test_weights_alone_are_saved_in_the_dtype_of_computing_and_copied_nowhere(start, options):
    checkpoints = start(
        save="weights", save_every=1, steps=4, keep_last=2, dtype="bfloat16", **options
    )
    copies = []
    checkpoints.writer.state_copier.stage = copies.append
    checkpoints.allocate_copies()
    weights = {}
    for step in range(1, 5):
        train(checkpoints.policy, step)
        # as engines get them, merged
        weights[step] = {n: w.bfloat16() for n, w in checkpoints.policy.sent_parameters()}
        save(checkpoints, step)
    assert not copies and names(checkpoints) == ["step_3", "step_4"]
    for step in (3, 4):
        folder = folder_of(checkpoints) / f"step_{step}"
        torch.testing.assert_close(
            load_file(folder / "model.safetensors"), weights[step], rtol=0, atol=0
        )
        assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
        assert not (folder / "resume").exists()
        assert (folder / "adapter").exists() == bool(options)
    assert checkpoints.writer.longest_s > 0
    (folder_of(checkpoints) / "step_3/resume").mkdir()
    train(checkpoints.policy, 5)
    save(checkpoints, 5)
    assert names(checkpoints) == ["step_3", "step_4", "step_5"], "step_3 is kept for --resume"


# What fails


def test_a_disk_that_hangs_ends_the_run_with_its_stacks_and_does_not_keep_the_process(
    start, capfd, monkeypatch
):
    checkpoints, may_end, exits = start(steps=1, timeout_s=0.5), threading.Event(), queue.Queue()
    monkeypatch.setattr(os, "_exit", exits.put)
    delay_writing(checkpoints, lambda: may_end.wait(60))
    checkpoints.save_if_due(1, PUBLISHER)
    with pytest.raises(TimeoutError, match="step_1 is not written after 1 s more: look at that"):
        checkpoints.writer.wait()
    assert "in write_later" in capfd.readouterr().err
    checkpoints.writer.close(0.1)
    assert exits.get(timeout=60) == 1
    may_end.set()
    checkpoints.writer.close(60)
    assert exits.empty()


# How it ends


@pytest.fixture
def at_once():
    """Handlers of all signals that end at once, as a run has before its first step."""

    def end(number, frame):
        raise Interrupted("at once", 128 + number)

    before = {number: signal.signal(number, end) for number in STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def raise_full(*_):
    raise OSError(28, "No space\nleft on device")


STOPPED = "stopped by {signal} after step {last}, which is saved"
ENDS = {
    "the last step": (None, "if due"),
    "a signal in the last step": (None, "always"),
    "a signal": (STOPPED, "always"),
    "a signal while nobody samples": (STOPPED, "always"),
    "a second signal": ("at once", "always"),
    "a signal and a lost node": ("at once", "never"),
    "a signal and a lost rank": ("at once", "never"),
    "out of time": ("--stop-after-s .+ nearly over, after step {last}, which is saved", "always"),
    "an error": ("not finite", "if due"),
    "a full disk": ("step_{last} was not written: .+No space left on device$", "never"),
    "rollout": ("no worker is left; continue from step {last}: .+ --resume ", "always"),
    "rollout and a full disk": (
        "no worker is left; .+step_{last} was not written: .+No space left on device; ",
        "never",
    ),
    "a bug": ("step_{last} was not written: rank 0: KeyError: 'bug'$", "never"),
}
"""What a run that ends so says, and whether its last step is saved."""
SAVE_EVERY = {"if due": (1, 2), "always": (2, None), "never": (1,)}
CASES = [
    # of the two values of an end each in turn in every run, and the other one before a release
    pytest.param(end, save_every, marks=[pytest.mark.slow] if (place + i) % 2 and has_two else [])
    for place, (end, (_, is_last_saved)) in enumerate(ENDS.items())
    for has_two in [len(SAVE_EVERY[is_last_saved]) == 2]
    for i, save_every in enumerate(SAVE_EVERY[is_last_saved])
]


@pytest.mark.parametrize(("end", "save_every"), CASES)
def test_however_a_run_ends_its_due_checkpoints_are_whole_and_have_the_weights_of_their_steps(
    start, at_once, monkeypatch, end, save_every
):
    """Each write goes on until it is waited for, and training beside it; the reason of an error comes before that."""
    rng = random.Random(f"{end}, {save_every}")
    line, is_last_saved = ENDS[end]
    number, steps = rng.choice(STOP_SIGNALS), rng.randint(4, 5)
    last = steps if "last step" in end else 3
    keep_last = rng.choice([0, 1, 3])
    elapsed_s = time.time() - module.psutil.Process().create_time()
    options = {"save_every": save_every, "keep_last": keep_last, "steps": steps}
    checkpoints = start(stop_after_s=elapsed_s + 1000, **options)
    checkpoints._longest_step_s = 400  # and a save as long, as none is known yet
    rank, folder, weights, written_before = checkpoints.rank, folder_of(checkpoints), {}, []
    rank.on_end.callback(lambda: written_before.append((folder / f"step_{last}").exists()))

    def wait():
        while not is_waited_for():
            time.sleep(0.01)
        if end == "a second signal" and checkpoints.writer.path.name == f"step_{last}":
            signal.pthread_kill(threading.main_thread().ident, number)

    delay_writing(checkpoints, wait)
    ended = (
        pytest.raises(BaseException, match=line.format(signal=number.name, last=last))
        if line
        else nullcontext()
    )
    with ended, rank.on_end, checkpoints:
        for step in range(1, last + 1):
            train(checkpoints.policy, step)
            weights[step] = weights_of(checkpoints.policy)
            if step == last:
                begin_to_end(end, checkpoints, number, monkeypatch)
            checkpoints.save_if_due(step, PUBLISHER)
        if end == "a signal while nobody samples":
            signal.raise_signal(number)
            assert rank.controller.is_asked_to_stop
            raise NobodySamples
        if end == "an error":
            raise RuntimeError("not finite")
        if "rollout" in end:
            raise CannotContinue("no worker is left")
    is_due = {s: save_every and (s % save_every == 0 or s == steps) for s in weights}
    is_due[last] = is_due[last] if is_last_saved == "if due" else is_last_saved == "always"
    saved = [step for step in weights if is_due[step]]
    kept = saved[-keep_last:]
    assert {path.name for path in folder.glob("*")} == {f"step_{step}" for step in kept}
    can_resume = kept if keep_last else kept[-2:]
    assert [path.name for path in list_checkpoints(folder)] == [f"step_{s}" for s in can_resume]
    for step in kept:
        tensors = load_file(folder / f"step_{step}" / "model.safetensors")
        assert all(tensor.equal(weights[step][name]) for name, tensor in tensors.items())
    assert not saved or newest(checkpoints).step == saved[-1]
    assert end != "an error" or written_before == [False]
    with pytest.raises(Interrupted, match="at once"):
        signal.raise_signal(number)


class Interrupting(io.RawIOBase):
    """A file whose first write a signal interrupts."""

    def __init__(self, number):
        self.numbers = [number]

    def writable(self):
        return True

    def write(self, text):
        while self.numbers:
            signal.raise_signal(self.numbers.pop())
        return len(text)


def begin_to_end(end, checkpoints, number, monkeypatch) -> None:
    """Do what ends a run, before its last step is saved."""
    if end == "a signal and a lost node":
        checkpoints.rank.watch.reason = "node 1 is gone"
    if end == "a signal and a lost rank":
        monkeypatch.setattr(module, "has_lost_a_rank", lambda: True)
    if "signal" in end and "nobody" not in end:
        with redirect_stdout(io.TextIOWrapper(io.BufferedWriter(Interrupting(number)))):
            print("step", flush=True)
    checkpoints.writer.wait()
    match end:
        case "out of time":
            checkpoints.writer.longest_s = 650
        case "a full disk" | "rollout and a full disk":
            checkpoints.writer.weights.write = raise_full
        case "a bug":
            checkpoints.writer.weights.write = lambda *_: {}["bug"]
