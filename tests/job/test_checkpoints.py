"""When a run is saved, what is left of it whatever happens meanwhile, and how signals and a limit of time end it."""

import dataclasses
import datetime
import json
import os
import queue
import signal
import sys
import threading
import time
import traceback
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from safetensors.torch import load_file
from tiny_policy import load, random_sequences, weights_of
from user_files import contents

from asyncrl.cluster.cluster import Cluster, Peer, form_cluster
from asyncrl.cluster.node_watch import NodeWatch
from asyncrl.cluster.processes import Interrupted
from asyncrl.config import Config
from asyncrl.controller.buffer import SampleBuffer
from asyncrl.controller.cut import ControllerState
from asyncrl.controller.tickets import TicketState
from asyncrl.job import checkpoints as module
from asyncrl.job.checkpoints import Checkpoints
from asyncrl.job.node import NobodySamples
from asyncrl.job.probe import Probe
from asyncrl.job.publisher import LeadingPublisher
from asyncrl.runlog.manifest import Checkpoint, checkpoints_in, newest_checkpoint
from asyncrl.runlog.run_directory import RunDirectory
from asyncrl.runlog.time_ledger import TrainerClock
from asyncrl.trainer.checkpoint import CheckpointWriter
from asyncrl.trainer.dealing import distribute
from extras.node_watch import LeaderWatch

PUBLISHER = SimpleNamespace(delayed={})
ENGINES = {"connect_workers": lambda specs: None}
"""What a leader has of engines that take no weights."""


class Rollout:
    """A controller of which there is only what is saved."""

    def __init__(self, config):
        self.config = config

    def cut(self, measure):
        return ControllerState(
            SampleBuffer(self.config).state(),
            TicketState(5, 5, 9, [1]),
            [],
            evaluates=True,
            evaluations=[],
            records=measure(),
            announced=2,
            num_restarts=1,
        )


def make_node(tmp_path, model, *, cluster=None, resumed=None, **options):
    """The surroundings of a rank, without rollout."""
    defaults = {"run_name": "one", "algo": "reinforce", "lr": 0.01}
    config = Config(model=model, runs_dir=str(tmp_path), **defaults, **options)
    cluster, run, controller = cluster or Cluster(), None, None
    if cluster.is_leader:
        folder = "" if cluster.is_first else f"one/node_{cluster.node}"
        event = resumed and resumed.event(cluster.node)
        run = RunDirectory(config, node_folder=folder, resumed=event)
        controller = Rollout(config)
    probe = resumed.probe_of(cluster.node) if resumed else {"tokens": [[1, 2, 3]], "scores": []}
    return SimpleNamespace(
        config=config,
        cluster=cluster,
        run=run,
        controller=controller,
        resumed=resumed,
        on_end=ExitStack(),
        device=torch.device("cpu"),
        clock=TrainerClock(),
        probe=Probe(config, probe),
        watch=NodeWatch(Cluster(), lambda: "no stacks"),
    )


@pytest.fixture
def start(tmp_path, model, one_rank):
    """Checkpoints of a run, by its options; `resumed` is what it continues from."""

    def make(**options):
        node = make_node(tmp_path, model, **options)
        try:
            return Checkpoints(node, load(node.config))
        except ValueError:
            node.run.close()
            raise

    return make


def folder_of(checkpoints: Checkpoints) -> Path:
    return checkpoints.node.run.path / "checkpoints"


def names(checkpoints: Checkpoints) -> list[str]:
    return sorted(path.name for path in folder_of(checkpoints).iterdir())


def are_equal(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> bool:
    return some.keys() == others.keys() and all(some[n].equal(others[n]) for n in some)


def train(policy, step, rank=0, num_ranks=1) -> None:
    share = distribute([random_sequences(4, seed=step)], num_ranks, 60)[rank]
    policy.train_step(share, policy_version=12)


def save(checkpoints: Checkpoints, *steps: int) -> None:
    for step in steps:
        checkpoints.save_if_due(step, PUBLISHER)
    checkpoints.writer.wait()


def newest(checkpoints: Checkpoints) -> Checkpoint:
    return newest_checkpoint(checkpoints.node.run.path)


# What is saved


def test_a_run_says_at_its_start_which_tensors_its_checkpoints_will_lack(
    model, start, capsys, monkeypatch
):
    checkpoints = start(steps=1)
    node, policy = checkpoints.node, checkpoints.policy
    vars(node).update(ENGINES)
    LeadingPublisher(node, policy)
    assert "warning" not in capsys.readouterr().out
    missing, *specs = policy.sent_specs()
    renamed = dataclasses.replace(missing, name="renamed")
    monkeypatch.setattr(policy, "sent_specs", lambda: [renamed, *specs])
    LeadingPublisher(node, policy)
    line = f"checkpoints will lack {missing.name}; will have, and it lacks, renamed\n"
    assert f"warning: beside --model {model}, {line}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("save_every", "keep_last", "kept", "can_resume"),
    [
        (None, 0, [], []),
        (2, 0, [2, 4, 5], [4, 5]),
        (1, 3, [3, 4, 5], [3, 4, 5]),
    ],
)
def test_every_nth_step_and_the_last_are_saved_and_older_ones_go(
    start, save_every, keep_last, kept, can_resume
):
    checkpoints = start(save_every=save_every, steps=5, keep_last=keep_last)
    save(checkpoints, *range(1, 6))
    folder = folder_of(checkpoints)
    found = {path.parent.name for path in folder.glob("*/model.safetensors")}
    assert found == {f"step_{step}" for step in kept} == set(names(checkpoints) if kept else [])
    assert [path.name for path in checkpoints_in(folder)] == [f"step_{step}" for step in can_resume]


def test_the_thread_that_saves_uses_no_gpu_but_that_of_its_rank(start, monkeypatch):
    """torch waits for a stream of the thread's GPU while it writes, of tensors in host memory, too."""
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
    assert calls[0] == (False, torch.device("cuda", 1)) and set(calls[1:]) == {"synchronize"}
    assert names(checkpoints) == ["step_1"]


def test_a_checkpoint_that_does_not_fit_the_model_leaves_the_run_as_it_was(start):
    checkpoints = start(save_every=2, steps=4, lora_rank=2)
    run = checkpoints.node.run
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
    accepted.node.run.close()
    assert accepted.node.run.last_metrics() == {"step": 2} and names(accepted) == ["step_2"]
    assert accepted.node.run.run_id == run.run_id


def test_what_is_written_is_what_was_there_at_the_cut_and_training_continues_meanwhile(start):
    checkpoints = start(save_every=1, steps=9)
    policy, may_write = checkpoints.policy, threading.Event()
    delay_writing(checkpoints, lambda: may_write.wait(60))
    train(policy, 1)
    at_the_cut = weights_of(policy)
    checkpoints.save_if_due(1, PUBLISHER)
    assert not (folder_of(checkpoints) / "step_1").exists()
    train(policy, 2)
    may_write.set()
    checkpoints.writer.wait()
    written = load_file(folder_of(checkpoints) / "step_1" / "model.safetensors")
    assert all(tensor.equal(at_the_cut[name]) for name, tensor in written.items())
    assert not any(tensor.equal(weights_of(policy)[name]) for name, tensor in written.items())


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
    policy, probe = checkpoints.policy, checkpoints.node.probe
    held = {}
    for version in (1, 2):
        specs = policy.sent_specs()
        held[version] = [(s.name, torch.full(s.shape, float(version))) for s in specs]
        probe.score(policy, version)
    checkpoints.save_if_due(3, SimpleNamespace(delayed=held))
    checkpoints.writer.wait()
    checkpoints.node.run.close()
    found = newest(checkpoints)
    manifest = json.loads((found.part / "manifest.json").read_text())["manifest"]
    files = {str(path.relative_to(found.path)) for path in contents(found.path)}
    assert files == manifest["files"].keys() | {"resume/manifest.json"}
    node = start(resumed=found, publish_delay=3, steps=9).node
    engines = {v: {0: (probe._scores[v].logprobs - np.float32(0.5),)} for v in held}
    mismatches = [(seen.version, seen.abs_mean) for seen in node.probe.compare(engines)]
    assert mismatches == [(version, pytest.approx(0.5)) for version in (1, 2)]
    vars(node).update(ENGINES)
    node.restored = SimpleNamespace(announced=0)
    publisher = LeadingPublisher(node, policy)
    version, published = publisher._delayed(3, policy.named_full_parameters())
    assert version == 1 and are_equal(dict(published), dict(held[1]))
    assert [name for name, _ in published] == [spec.name for spec in policy.sent_specs()], (
        "in the order of sending"
    )
    node.restored = SimpleNamespace(announced=3)  # the run was to end with that step
    publisher = LeadingPublisher(node, policy)
    versions = [publisher._delayed(step, policy.named_full_parameters())[0] for step in range(3, 9)]
    assert versions == [3, 3, 3, 3, 4, 5], "a worker never goes back to older weights"


# What fails


def raise_full(*_):
    raise OSError(28, "No space\nleft on device")


@pytest.mark.parametrize(
    ("write", "line"),
    [
        (raise_full, "step_2 was not written: .+No space left on device$"),
        (lambda *_: {}["bug"], "step_2 was not written: rank 0: KeyError: 'bug'$"),
        ("full disk", r"needs 0\.03\d GB \(0\.00\d of tensors \+ 0\.032\), 0\.001"),
        ("taken", "step_2 exists already"),
    ],
)
def test_a_write_that_fails_is_one_line_and_leaves_the_older_checkpoint_as_it_was(
    start, monkeypatch, write, line
):
    checkpoints = start(save_every=1, steps=9, keep_last=1)
    # what a run before may have left is in nobody's way
    folder_of(checkpoints).mkdir()
    (folder_of(checkpoints) / "step_1.tmp").write_text("")
    save(checkpoints, 1)
    assert names(checkpoints) == ["step_1"]
    if write == "full disk":
        monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1e6))
    elif write == "taken":
        (folder_of(checkpoints) / "step_2").mkdir(parents=True)
    else:
        checkpoints.writer.weights.write = write
    before = contents(folder_of(checkpoints))
    checkpoints.save_if_due(2, PUBLISHER)
    with pytest.raises(OSError, match=line) as ended:
        checkpoints.save_if_due(3, PUBLISHER)
    assert "in finish" in str(ended.value.__cause__) or isinstance(write, str), "its stack"
    assert contents(folder_of(checkpoints)) == before and newest(checkpoints).step == 1


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
    """Handlers of both signals that end at once, as a run has before its first step."""

    def end(number, frame):
        raise Interrupted("at once", 128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_the_step_end_and_be_saved_and_a_second_one_ends_the_run_at_once(
    start, at_once, number, capsys
):
    """So does a first one after the end of another node."""
    checkpoints = start(save_every=None, steps=9)
    line = f"stopped by {number.name} after step 1, which is saved"
    with pytest.raises(Interrupted, match=line) as ended, checkpoints:
        signal.raise_signal(number)
        assert f"{number.name}: saves and ends after this step" in capsys.readouterr().out
        checkpoints.save_if_due(1, PUBLISHER)
    assert ended.value.args[1] == 128 + number and newest(checkpoints).step == 1
    with pytest.raises(Interrupted, match="at once"), checkpoints:
        signal.raise_signal(number)
    checkpoints._asked_by = 0
    checkpoints.node.watch.reason = "node 1 is gone"
    with pytest.raises(Interrupted, match="at once"), checkpoints:
        signal.raise_signal(signal.SIGTERM)
    with pytest.raises(Interrupted, match="at once"):
        signal.raise_signal(number)


@pytest.mark.parametrize("step", [2, 3])
def test_a_run_that_is_stopped_while_nobody_samples_saves_what_was_not_saved(start, at_once, step):
    checkpoints = start(save_every=2, steps=9)
    line = f"stopped by SIGTERM after step {step}, which is saved$"
    with pytest.raises(Interrupted, match=line), checkpoints:
        checkpoints.save_if_due(step, PUBLISHER)
        signal.raise_signal(signal.SIGTERM)
        assert checkpoints.node.controller.is_asked_to_stop
        raise NobodySamples
    assert newest(checkpoints).step == step


@pytest.mark.parametrize(
    ("steps", "has_signal_before", "has_signal_meanwhile", "error"),
    [
        (1, False, True, None),
        (9, True, True, Interrupted),
        (9, False, False, RuntimeError),
    ],
)
def test_whatever_ends_the_run_a_checkpoint_that_is_being_written_comes_to_its_end(
    start, at_once, steps, has_signal_before, has_signal_meanwhile, error
):
    """Also at a second signal, or an error; a first signal in the last step lets the run finish.

    The reason of an error is there before that.
    """
    checkpoints = start(save_every=1, steps=steps)
    written_first, on_end = [], checkpoints.node.on_end
    on_end.callback(lambda: written_first.append((folder_of(checkpoints) / "step_1").exists()))

    def interrupt():
        while not is_waited_for():
            time.sleep(0.01)
        if has_signal_meanwhile:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM)
            time.sleep(0.1)  # the signal may come while this writes, or later on a busy machine

    delay_writing(checkpoints, interrupt)
    with pytest.raises(error) if error else nullcontext(), on_end, checkpoints:
        if has_signal_before:
            signal.raise_signal(signal.SIGTERM)
        checkpoints.save_if_due(1, PUBLISHER)
        if error is RuntimeError:
            raise RuntimeError("not finite")
    assert newest(checkpoints).step == 1
    # at a second signal it may be written by then
    assert error is Interrupted or written_first == [error is None]


def test_a_run_stops_before_a_step_that_may_be_too_long_for_its_time(start):
    elapsed_s = time.time() - module.psutil.Process().create_time()
    checkpoints = start(steps=9, stop_after_s=elapsed_s + 100)
    line = r"--stop-after-s .+ nearly over, after step 3, which is saved"
    with pytest.raises(Interrupted, match=line) as ended, checkpoints:
        checkpoints.save_if_due(1, PUBLISHER)
        checkpoints._longest_step_s = 40  # and a save as long, as none is known yet
        checkpoints.save_if_due(2, PUBLISHER)
        assert not folder_of(checkpoints).exists()
        checkpoints.writer.longest_s = 65
        checkpoints.save_if_due(3, PUBLISHER)
    assert ended.value.args[1] == 75 and newest(checkpoints).step == 3


# Several ranks


def join(rank: int, folder: str) -> Cluster:
    """Form a cluster of two nodes of a rank each."""
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, "store"), 2)
    peers = [Peer(node, "ab"[node]) for node in (0, 1)]
    return form_cluster(peers, rank, store, "gloo", datetime.timedelta(seconds=60))


def save_on_two_ranks(rank: int, folder: str, model: str) -> None:
    """Two nodes of a rank each train while they save; node 1 is asked to stop."""
    cluster = join(rank, folder)
    if rank == 1:
        dist.barrier()  # rank 0 makes the run's directory
    node = make_node(Path(folder), model, cluster=cluster, save_every=1, steps=99)
    if rank == 0:
        dist.barrier()
    node.watch = LeaderWatch(cluster, lambda: "no stacks")
    policy = load(node.config)
    checkpoints = Checkpoints(node, policy)
    ended = None
    try:
        with checkpoints:
            for step in range(1, 100):
                train(policy, step, rank, num_ranks=2)
                if rank == 1 and step == 4:
                    signal.raise_signal(signal.SIGTERM)
                checkpoints.save_if_due(step, PUBLISHER)
    except Interrupted as error:
        ended = error
    assert str(ended).startswith("stopped by SIGTERM after step 4, which is saved")
    time.sleep(0.3 * rank)  # one node's teardown takes longer, and the other's end is not its cause
    assert node.watch.explain(ended) is ended
    trained = weights_of(policy)
    if rank == 0:
        torch.save(trained, os.path.join(folder, "trained.pt"))
    dist.destroy_process_group()


def test_two_nodes_save_while_they_train_stop_together_and_one_continues(tmp_path, model, start):
    assert run_ranks(save_on_two_ranks, 2, str(tmp_path), model) == [0, 0]
    found = newest_checkpoint(tmp_path / "one")
    assert (found.step, len(found.nodes)) == (4, 2)
    assert [found.probe_of(node)["tokens"] for node in (0, 1)] == [[[1, 2, 3]]] * 2
    records = [found.event(node)["records"].keys() for node in (0, 1)]
    assert records == [{"metrics", "events", "samples"}, {"events"}]
    resumed = start(resumed=found)
    assert are_equal(weights_of(resumed.policy), torch.load(tmp_path / "trained.pt"))
