"""When a run is saved, what is left of it whatever happens meanwhile, and how signals and a limit of time end it."""

import datetime
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from safetensors.torch import load_file
from tiny_policy import load, random_sequences, save_tiny_model

from asyncrl.cluster.cluster import Cluster, Peer, form_cluster
from asyncrl.cluster.node_watch import NodeWatch
from asyncrl.cluster.processes import Interrupted
from asyncrl.config import Config
from asyncrl.controller.buffer import SampleBuffer
from asyncrl.controller.cut import ControllerState
from asyncrl.controller.evaluation import Evaluation
from asyncrl.controller.tickets import TicketState
from asyncrl.job import checkpoints as module
from asyncrl.job.checkpoints import Checkpoints
from asyncrl.job.node import NobodySamples, open_records
from asyncrl.job.probe import Probe
from asyncrl.job.publisher import LeadingPublisher
from asyncrl.job.resume import controller_of
from asyncrl.runlog.manifest import PART, Checkpoint, checkpoints_in, id_of, newest_checkpoint
from asyncrl.runlog.run_directory import RunDirectory
from asyncrl.runlog.time_ledger import TrainerClock
from asyncrl.trainer.batch import distribute
from scripts.lines import read

CPU, BUDGET = torch.device("cpu"), 60
PUBLISHER = SimpleNamespace(delayed={})
ENGINES = {
    "controller": SimpleNamespace(connect=lambda transport: None),
    "placement": SimpleNamespace(transport="none", workers=()),
}
"""What a leader has of engines that take no weights."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_model(str(tmp_path_factory.mktemp("model")))


class Rollout:
    """A controller of which there is only what is saved."""

    def __init__(self, config):
        self.config = config

    def cut(self, measure):
        tickets = TicketState(5, 5, 9, [1])
        state = SampleBuffer(self.config).state()
        ended = [Evaluation(2, 1)]
        counts = {"announced": 2, "num_restarts": 1}
        return ControllerState(
            state, tickets, [], evaluates=True, evaluations=ended, records=measure(), **counts
        )


def make_node(tmp_path, model, *, cluster=None, resumed=None, **options):
    """The surroundings of a rank, without rollout."""
    config = Config(
        model=model, runs_dir=str(tmp_path), run_name="one", algo="reinforce", lr=0.01, **options
    )
    cluster, run, controller = cluster or Cluster(), None, None
    if cluster.is_leader:
        folder = "" if cluster.is_first else f"one/node_{cluster.node}"
        run = RunDirectory(
            config, node_folder=folder, resumed=resumed and resumed.event(cluster.node)
        )
        controller = Rollout(config)
    new = {"tokens": [[1, 2, 3]], "scores": []}
    probe = Probe(config, resumed.probe_of(cluster.node) if resumed else new)
    of_rank = {"device": CPU, "clock": TrainerClock(), "probe": probe}
    of_rank["watch"] = NodeWatch(Cluster(), lambda: "no stacks")
    return SimpleNamespace(
        config=config,
        cluster=cluster,
        run=run,
        controller=controller,
        resumed=resumed,
        on_end=None,
        **of_rank,
    )


@pytest.fixture
def saved(tmp_path, model, one_rank):
    """Checkpoints of a new run, by its options."""

    def make(**options):
        node = make_node(tmp_path, model, **options)
        return Checkpoints(node, load(node.config))

    return make


def folder_of(checkpoints: Checkpoints) -> Path:
    return checkpoints.node.run.path / "checkpoints"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def weights(policy) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in policy.named_full_parameters()}


def train(policy, steps) -> None:
    for step in steps:
        policy.train_step(
            distribute([random_sequences(4, seed=step)], 1, BUDGET)[0], policy_version=12
        )


# What is saved


def test_a_run_says_at_its_start_which_tensors_its_checkpoints_will_lack(model, capsys):
    node = SimpleNamespace(cluster=Cluster(), config=Config(), resumed=None, on_end=None, **ENGINES)
    names = sorted(load_file(os.path.join(model, "model.safetensors")))
    specs = [SimpleNamespace(name=name) for name in names]
    policy = SimpleNamespace(
        module=SimpleNamespace(attention="a"), model_path=model, sent_specs=lambda: specs
    )
    LeadingPublisher(node, policy)
    assert "warning" not in capsys.readouterr().out
    del specs[0]
    LeadingPublisher(node, policy)
    assert (
        f"warning: beside --model {model}, checkpoints will lack {names[0]}\n"
        in capsys.readouterr().out
    )


def test_a_run_that_saves_nothing_at_its_end_still_saves_where_it_is_stopped(saved):
    checkpoints = saved(save_every=None, steps=5)
    for step in (4, 5):
        checkpoints.save_if_due(step, PUBLISHER)
    checkpoints.writer.wait()
    assert not folder_of(checkpoints).exists()
    checkpoints._ask(signal.SIGTERM, None)
    with pytest.raises(Interrupted, match="after step 3, which is saved"):
        checkpoints.save_if_due(3, PUBLISHER)
    assert names(folder_of(checkpoints)) == ["step_3"]


def test_a_run_goes_on_from_the_newest_of_what_it_saved(tmp_path, model, saved):
    checkpoints = saved(save_every=2, steps=5)
    policy, node = checkpoints.policy, checkpoints.node
    for step in range(1, 6):
        train(policy, [step])
        node.run.log_metrics({"step": step})
        checkpoints.save_if_due(step, PUBLISHER)
    checkpoints.writer.wait()
    assert names(folder_of(checkpoints)) == ["step_2", "step_4", "step_5"], (
        "every second, and the last"
    )
    node.run.close()
    found = newest_checkpoint(node.run.path)
    assert (found.step, found.probe_of(0)["tokens"], found.skipped) == (5, [[1, 2, 3]], [])
    assert found.event(0)["records"]["metrics"] == (node.run.path / "metrics.jsonl").stat().st_size
    resumed = Checkpoints(
        make_node(tmp_path, model, resumed=found, save_every=2), load(node.config)
    )
    assert resumed.policy.num_updates == 5
    assert all(
        torch.equal(tensor, weights(policy)[name])
        for name, tensor in weights(resumed.policy).items()
    )
    state = controller_of(found, model, Cluster(), node.config)
    assert state.tickets == TicketState(5, 5, 9, [1]) and state.evaluations[0].version == 2


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_checkpoint_that_does_not_fit_the_model_leaves_the_run_as_it_was(tmp_path, model, saved):
    checkpoints = saved(save_every=2, steps=4, lora_rank=2)
    node = checkpoints.node
    for step in (1, 2, 3):
        node.run.log_metrics({"step": step})
        checkpoints.save_if_due(step, PUBLISHER)
    checkpoints.writer.wait()
    node.run.close()
    (folder_of(checkpoints) / "step_3.tmp").write_text("half written")
    before, found = contents(node.run.path), newest_checkpoint(node.run.path)
    refused = make_node(tmp_path, model, resumed=found, lora_rank=3)
    with pytest.raises(ValueError, match="it is of another model"):
        Checkpoints(refused, load(refused.config))
    refused.run.close()
    assert contents(node.run.path) == before
    accepted = make_node(tmp_path, model, resumed=found, lora_rank=2)
    Checkpoints(accepted, load(accepted.config))
    accepted.run.close()
    assert accepted.run.last_metrics() == {"step": 2} and names(folder_of(checkpoints)) == [
        "step_2"
    ]


def save_again(tmp_path: Path, model: str, checkpoints: Checkpoints) -> None:
    """Go on from the newest checkpoint of a run, and save step 2."""
    found = newest_checkpoint(checkpoints.node.run.path)
    node = make_node(tmp_path, model, resumed=found, save_every=1)
    resumed = Checkpoints(node, load(node.config))
    resumed.save_if_due(2, PUBLISHER)
    resumed.writer.wait()
    node.run.close()


def test_a_checkpoint_has_the_id_of_its_run_which_stays_when_that_goes_on(tmp_path, model, saved):
    checkpoints = saved(save_every=1, steps=9)
    checkpoints.save_if_due(1, PUBLISHER)
    checkpoints.writer.wait()
    run = checkpoints.node.run
    run.close()
    save_again(tmp_path, model, checkpoints)
    found = newest_checkpoint(run.path)
    assert (found.step, found.run_id) == (2, run.run_id) and re.fullmatch(
        "[0-9a-f]{16}", found.run_id
    )
    assert json.loads((run.path / "run.json").read_text())["run_id"] == found.run_id


def test_the_manifest_names_every_file_that_is_there(saved):
    checkpoints = saved(steps=1)
    checkpoints.save_if_due(1, PUBLISHER)
    checkpoints.writer.wait()
    folder = folder_of(checkpoints) / "step_1"
    manifest = json.loads((folder / PART / "manifest.json").read_text())["manifest"]
    there = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert (
        there - manifest["files"].keys() == {"resume/manifest.json"}
        and manifest["files"].keys() < there
    )


def test_what_is_written_is_what_was_there_at_the_cut_and_training_goes_on_meanwhile(saved):
    checkpoints = saved(save_every=1, steps=9)
    policy, may_write, write = (
        checkpoints.policy,
        threading.Event(),
        checkpoints.writer.weights.write,
    )
    checkpoints.writer.weights.write = lambda *args: may_write.wait(60) and write(*args)
    train(policy, [1])
    at_the_cut = weights(policy)
    checkpoints.save_if_due(1, PUBLISHER)
    assert not (folder_of(checkpoints) / "step_1").exists()
    train(policy, [2, 3])
    may_write.set()
    checkpoints.writer.wait()
    for name, tensor in load_file(folder_of(checkpoints) / "step_1" / "model.safetensors").items():
        assert torch.equal(tensor, at_the_cut[name]) and not torch.equal(
            tensor, weights(policy)[name]
        )


def test_versions_that_are_held_back_are_held_back_after_a_resume(tmp_path, model, saved):
    checkpoints = saved(steps=3, publish_delay=3, async_ratio=0.0)
    policy = checkpoints.policy
    held = {
        v: [(spec.name, torch.full(spec.shape, float(v))) for spec in policy.sent_specs()]
        for v in (1, 2)
    }
    probe = checkpoints.node.probe
    for version in held:
        probe.score(policy, version)
    checkpoints.save_if_due(3, SimpleNamespace(delayed=held))
    checkpoints.writer.wait()
    checkpoints.node.run.close()
    node = make_node(
        tmp_path,
        model,
        resumed=newest_checkpoint(checkpoints.node.run.path),
        publish_delay=3,
        steps=9,
    )
    assert [node.probe.tokens_at(version) for version in (1, 2, 3)] == [
        ((1, 2, 3),),
        ((1, 2, 3),),
        (),
    ]
    of_engines = {
        version: {0: (probe._scores[version].logprobs - np.float32(0.5),)} for version in held
    }
    found = [(mismatch.version, mismatch.abs_mean) for mismatch in node.probe.compare(of_engines)]
    assert found == [(version, pytest.approx(0.5)) for version in (1, 2)], (
        "they are compared as in an unbroken run"
    )
    vars(node).update(ENGINES)
    node.restored = SimpleNamespace(announced=0)
    publisher = LeadingPublisher(node, policy)
    version, published = publisher._delayed(3, policy.named_full_parameters())
    assert version == 1 and all(
        torch.equal(a, b) for (_, a), (_, b) in zip(published, held[1], strict=True)
    )
    assert [name for name, _ in published] == [spec.name for spec in policy.sent_specs()], (
        "in the order of sending"
    )
    assert publisher.delayed.keys() == {1, 2}
    assert publisher._delayed(5, policy.named_full_parameters())[0] == 2
    node.restored = SimpleNamespace(announced=3)  # the run was to end with that step
    publisher = LeadingPublisher(node, policy)
    versions = [publisher._delayed(step, policy.named_full_parameters())[0] for step in range(3, 9)]
    assert versions == [3, 3, 3, 3, 4, 5], "a worker never goes back to older weights"


# What fails


def test_a_write_that_fails_is_one_line_at_the_next_save_and_leaves_the_older_checkpoint_as_it_was(
    saved,
):
    checkpoints = saved(save_every=1, steps=9, keep_last=1)
    checkpoints.save_if_due(1, PUBLISHER)
    checkpoints.writer.wait()
    before = contents(folder_of(checkpoints))

    def fail(*_):
        raise OSError(28, "No space\nleft on device")

    checkpoints.writer.weights.write = fail
    checkpoints.save_if_due(2, PUBLISHER)
    with pytest.raises(OSError, match=r"step_2 was not written: .+No space left on device$"):
        checkpoints.save_if_due(3, PUBLISHER)
    assert contents(folder_of(checkpoints)) == before
    assert (
        names(folder_of(checkpoints)) == ["step_1"]
        and newest_checkpoint(checkpoints.node.run.path).step == 1
    )


def test_a_full_disk_is_seen_before_writing_with_the_arithmetic(saved, monkeypatch):
    checkpoints = saved(steps=1)
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1e6))
    checkpoints.save_if_due(1, PUBLISHER)
    with pytest.raises(OSError, match=r"needs 0\.03\d GB \(0\.00\d of tensors \+ 0\.032\), 0\.001"):
        checkpoints.writer.wait()
    assert names(folder_of(checkpoints)) == []


def test_a_bug_in_the_writing_is_not_taken_for_success_and_keeps_its_stack(saved):
    checkpoints = saved(steps=1)
    checkpoints.writer.weights.write = lambda *_: {}["bug"]
    checkpoints.save_if_due(1, PUBLISHER)
    with pytest.raises(OSError, match="step_1 was not written: rank 0: KeyError: 'bug'") as ended:
        checkpoints.writer.wait()
    assert "in finish" in str(ended.value.__cause__)


def test_a_disk_that_hangs_ends_the_run_with_its_stacks(saved, capfd):
    checkpoints, may_end = saved(steps=1, timeout_s=0.5), threading.Event()
    checkpoints.writer.weights.write = lambda *_: may_end.wait(60)
    checkpoints.save_if_due(1, PUBLISHER)
    with pytest.raises(
        TimeoutError, match=r"step_1 is not written after 1 s more: look at that disk"
    ):
        checkpoints.writer.wait()
    assert "in finish" in capfd.readouterr().err
    may_end.set()
    checkpoints.writer.close(60)


def test_a_writing_thread_that_hangs_does_not_keep_the_process():
    code = """
import time
from contextlib import ExitStack
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from asyncrl.trainer.checkpoint import CheckpointWriter
future = ThreadPoolExecutor().submit(time.sleep, 600)
CheckpointWriter.close(SimpleNamespace(_future=future, config=SimpleNamespace(timeout_s=0.5)), 0.1)
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 1


def test_a_file_that_has_the_name_of_what_is_half_written_is_in_nobodys_way(saved):
    checkpoints = saved(steps=1)
    folder_of(checkpoints).mkdir()
    (folder_of(checkpoints) / "step_1.tmp").write_text("")
    checkpoints.save_if_due(1, PUBLISHER)
    checkpoints.writer.wait()
    assert names(folder_of(checkpoints)) == ["step_1"]


def test_a_checkpoint_is_never_written_over(saved):
    checkpoints = saved(save_every=1, steps=9)
    (folder_of(checkpoints) / "step_1").mkdir(parents=True)
    checkpoints.save_if_due(1, PUBLISHER)
    with pytest.raises(OSError, match="step_1 exists already"):
        checkpoints.writer.wait()


@pytest.mark.parametrize(
    ("keep_last", "kept", "can_resume"),
    [(0, [1, 2, 3, 4], [3, 4]), (1, [4], [4]), (3, [2, 3, 4], [2, 3, 4])],
)
def test_older_checkpoints_go_when_a_newer_one_is_there(saved, keep_last, kept, can_resume):
    checkpoints = saved(save_every=1, steps=4, keep_last=keep_last)
    for step in range(1, 5):
        checkpoints.save_if_due(step, PUBLISHER)
    checkpoints.writer.wait()
    folder = folder_of(checkpoints)
    assert names(folder) == [f"step_{step}" for step in kept]
    assert [path.name for path in checkpoints_in(folder)] == [f"step_{step}" for step in can_resume]
    assert all((folder / name / "model.safetensors").exists() for name in names(folder))


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
def test_a_signal_lets_the_step_end_and_be_saved_and_then_ends_the_run(
    saved, at_once, number, capsys
):
    checkpoints = saved(steps=9)
    what = rf"stopped by {number.name} after step 1, which is saved"
    with pytest.raises(Interrupted, match=what) as ended, checkpoints:
        signal.raise_signal(number)
        assert f"{number.name}: saves and ends after this step" in capsys.readouterr().out
        checkpoints.save_if_due(1, PUBLISHER)
        raise AssertionError("went on")
    assert ended.value.args[1] == 128 + number
    assert newest_checkpoint(checkpoints.node.run.path).step == 1
    with pytest.raises(Interrupted, match="at once"):
        signal.raise_signal(number)


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_and_the_end_of_another_node_end_the_run_at_once(saved, at_once, second):
    checkpoints = saved(steps=9)
    with pytest.raises(Interrupted, match="at once"), checkpoints:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(second)
    checkpoints.node.watch.reason = "node 1 is gone"
    checkpoints._asked_by = 0
    with pytest.raises(Interrupted, match="at once"), checkpoints:
        signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize("step", [2, 3])
def test_a_run_that_is_stopped_while_nobody_samples_saves_what_was_not_saved(saved, at_once, step):
    checkpoints = saved(save_every=2, steps=9)
    with (
        pytest.raises(Interrupted, match=f"stopped by SIGTERM after step {step}, which is saved$"),
        checkpoints,
    ):
        checkpoints.save_if_due(step, PUBLISHER)
        signal.raise_signal(signal.SIGTERM)
        assert checkpoints.node.controller.is_asked_to_stop
        raise NobodySamples
    assert newest_checkpoint(checkpoints.node.run.path).step == step


def test_a_signal_in_the_last_step_lets_the_run_finish(saved, at_once):
    checkpoints = saved(steps=1)
    with checkpoints:
        signal.raise_signal(signal.SIGTERM)
        checkpoints.save_if_due(1, PUBLISHER)
    assert newest_checkpoint(checkpoints.node.run.path).step == 1


def test_a_signal_while_the_last_checkpoint_is_written_lets_it_come_to_its_end(saved, at_once):
    checkpoints = saved(steps=1)
    write = checkpoints.writer.weights.write
    checkpoints.writer.weights.write = lambda *args: time.sleep(1) or write(*args)
    with checkpoints:
        checkpoints.save_if_due(1, PUBLISHER)
        timer = threading.Timer(0.3, signal.raise_signal, [signal.SIGTERM])
        timer.start()
    timer.join()
    assert newest_checkpoint(checkpoints.node.run.path).step == 1


@pytest.mark.parametrize("steps", [1, 9])
def test_a_second_signal_while_a_checkpoint_is_written_lets_it_come_to_its_end(
    saved, at_once, steps
):
    checkpoints = saved(steps=steps)
    write, is_writing = checkpoints.writer.weights.write, threading.Event()
    checkpoints.writer.weights.write = lambda *args: (
        is_writing.set() or time.sleep(1) or write(*args)
    )

    def interrupt_the_wait():
        is_writing.wait(60)
        time.sleep(0.2)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM)

    thread = threading.Thread(target=interrupt_the_wait)
    with pytest.raises(Interrupted, match="at once"), checkpoints:
        signal.raise_signal(signal.SIGTERM)
        thread.start()
        checkpoints.save_if_due(1, PUBLISHER)
    thread.join()
    assert newest_checkpoint(checkpoints.node.run.path).step == 1


def test_a_run_stops_before_a_step_that_may_be_too_long_for_its_time(saved, monkeypatch):
    elapsed = time.time() - module.psutil.Process().create_time()
    checkpoints = saved(steps=9, stop_after_s=elapsed + 100)
    what = r"--stop-after-s .+ nearly over, after step 3, which is saved"
    with pytest.raises(Interrupted, match=what) as ended, checkpoints:
        checkpoints.save_if_due(1, PUBLISHER)
        checkpoints._longest_step_s = 40  # and a save as long, as none is known yet
        checkpoints.save_if_due(2, PUBLISHER)
        assert not folder_of(checkpoints).exists()
        checkpoints.writer.longest_s = 65
        checkpoints.save_if_due(3, PUBLISHER)
    assert ended.value.args[1] == 75 and newest_checkpoint(checkpoints.node.run.path).step == 3


def test_an_error_in_the_run_lets_what_is_being_written_come_to_its_end(saved):
    checkpoints = saved(save_every=1, steps=9)
    write = checkpoints.writer.weights.write
    checkpoints.writer.weights.write = lambda *args: time.sleep(0.5) or write(*args)
    with pytest.raises(RuntimeError, match="not finite"), checkpoints:
        checkpoints.save_if_due(1, PUBLISHER)
        raise RuntimeError("not finite")
    assert newest_checkpoint(checkpoints.node.run.path).step == 1


# Several ranks


def open_on_two_nodes(rank: int, folder: str) -> None:
    """Two nodes make a run's records, and then go on with them from a checkpoint."""
    store = dist.FileStore(os.path.join(folder, "store"), 2)
    peers = [Peer(node, "ab"[node]) for node in (0, 1)]
    cluster = form_cluster(peers, rank, store, "gloo", datetime.timedelta(seconds=60))
    config = Config(runs_dir=folder, run_name="one")
    for _ in range(2):
        checkpoint = None
        if (Path(folder) / "one/run.json").exists():
            checkpoint = Checkpoint(Path(folder), [], "", 1, "", [{"records": {}}] * 2, [])
        dist.barrier()
        run = open_records(
            SimpleNamespace(config=config, cluster=cluster, resumed=checkpoint, on_end=ExitStack()),
            "no model",
        )
        run.cut_back()
        run.close()
        dist.barrier()
    dist.destroy_process_group()


def test_the_folders_of_all_nodes_have_the_id_of_the_run(tmp_path):
    assert run_ranks(open_on_two_nodes, 2, str(tmp_path)) == [0, 0]
    ids = [id_of(folder) for folder in (tmp_path / "one", tmp_path / "one/node_1")]
    assert ids[0] == ids[1] and re.fullmatch("[0-9a-f]{16}", ids[0])
    events = [read(tmp_path / "one" / name / "events.jsonl") for name in ("", "node_1")]
    assert [[event["event"] for event in of_node] for of_node in events] == [
        ["run_resumed", "run_ended"]
    ] * 2


def save_on_two_ranks(rank: int, folder: str, model: str) -> None:
    """Two nodes of a rank each train on while they save; node 1 is asked to stop."""
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, "store"), 2)
    peers = [Peer(node, "ab"[node]) for node in (0, 1)]
    cluster = form_cluster(peers, rank, store, "gloo", datetime.timedelta(seconds=60))
    if rank == 1:
        dist.barrier()  # rank 0 makes the run's directory
    node = make_node(Path(folder), model, cluster=cluster, save_every=1, steps=99)
    if rank == 0:
        dist.barrier()
    node.watch = NodeWatch(cluster, lambda: "no stacks")
    policy = load(node.config)
    checkpoints = Checkpoints(node, policy)
    ended = None
    try:
        with checkpoints:
            for step in range(1, 100):
                policy.train_step(
                    distribute([random_sequences(4, seed=step)], 2, BUDGET)[rank], policy_version=12
                )
                if rank == 1 and step == 4:
                    signal.raise_signal(signal.SIGTERM)
                checkpoints.save_if_due(step, PUBLISHER)
    except Interrupted as error:
        ended = error
    assert str(ended).startswith("stopped by SIGTERM after step 4, which is saved")
    time.sleep(0.3 * rank)  # one node's teardown takes longer, and the other's end is not its cause
    assert node.watch.explain(ended) is ended
    kept = weights(policy)
    if rank == 0:
        torch.save(kept, os.path.join(folder, "kept.pt"))
    dist.destroy_process_group()


def test_two_nodes_save_while_they_train_stop_together_and_one_goes_on(tmp_path, model, one_rank):
    assert run_ranks(save_on_two_ranks, 2, str(tmp_path), model) == [0, 0]
    found = newest_checkpoint(tmp_path / "one")
    assert (found.step, len(found.nodes)) == (4, 2)
    assert [found.probe_of(node)["tokens"] for node in (0, 1)] == [[[1, 2, 3]]] * 2
    records = [found.event(node)["records"].keys() for node in (0, 1)]
    assert records == [{"metrics", "events", "samples"}, {"events"}]
    resumed = Checkpoints(
        make_node(tmp_path, model, resumed=found), load(Config(model=model, algo="reinforce"))
    )
    kept = torch.load(tmp_path / "kept.pt")
    assert all(torch.equal(tensor, kept[name]) for name, tensor in weights(resumed.policy).items())
