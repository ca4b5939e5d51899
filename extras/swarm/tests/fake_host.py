"""A host of a swarm without an engine, and a run that it joins: real sockets, a real controller, made-up answers."""

import contextlib
import dataclasses
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import zmq
from fake_worker import run_fake_worker, trajectory

from asyncrl.cluster.placement import Placement, WorkerPlacement
from asyncrl.config import Config
from asyncrl.controller.tickets import PromptSource
from asyncrl.messages import (
    Abort,
    Connect,
    Finished,
    Probed,
    Ready,
    SampledTokens,
    Tickets,
    Update,
    Updated,
)
from asyncrl.weights.shm import ShmTransport
from asyncrl.weights.transport import Announcement, ParameterSpec, Transport
from data.problem import Problem
from extras.baselines import BaselineTickets
from extras.swarm.controller import SwarmController
from extras.swarm.hub import make_key
from extras.swarm.link import Link
from extras.swarm.puller import Puller
from extras.swarm.remote import SwarmWorkers
from extras.swarm.swarm import Swarm
from extras.swarm.wire import (
    PROTOCOL,
    TO_ENGINE,
    TO_HOST,
    Fetch,
    Fetched,
    Join,
    Piece,
    Refused,
    Welcome,
    code_digest,
    read_key,
)

PROBE = ((2, 3, 5),)
MODEL_CONFIG = '{"model_type": "llama", "vocab_size": 16}'


def wait_until(condition, timeout_s=60.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.005)


class Run:
    """A controller and its swarm, and the trainer's part in their protocol."""

    def __init__(self, controller, swarm, key_path, events, num_floats):
        self.controller, self.swarm = controller, swarm
        self.events, self.num_floats = events, num_floats
        self.address, self.key_path = f"127.0.0.1:{swarm.hub.port}", str(key_path)
        self.version, self.trained, self.value_of = -1, [], float

    def publish(self, evaluate=False, probe=()):
        self.version += 1
        evaluate |= self.controller.withdraw()
        weights = torch.full((self.num_floats,), self.value_of(self.version))
        staged = self.controller.stage(self.version, [("w", weights)])
        self.controller.publish(Announcement(self.version, self.version, staged, probe, evaluate))

    def step(self):
        """Take a batch and publish the next version. The ledger balances, and nothing is trained on twice."""
        return self._train(self.controller.take_batch())

    def step_if_ready(self):
        """The same, unless that would have to wait."""
        self.controller.take_metrics()  # raises what ended the swarm's thread
        if (groups := self.controller.take_batch_if_ready()) is not None:
            self._train(groups)

    def _train(self, groups):
        trained = [(t.ticket_id, t.member) for group in groups for t in group.trajectories]
        assert not set(trained) & set(self.trained)
        self.trained += trained
        self.controller.take_metrics()  # raises if the ledger does not balance
        self.publish()
        return groups

    @property
    def taken(self):
        """Tickets whose trajectories were trained on."""
        return [ticket_id for ticket_id, _ in self.trained]

    def workers_of(self, name):
        """Numbers of the workers of hosts of a name, in order."""
        started = [event for event in self.events if event["event"] == "worker_started"]
        return [event["worker"] for event in started if event.get("machine") == name]

    def left(self):
        """Hosts that have left or were shut out, and why."""
        return [
            (event["machine"], event["why"])
            for event in self.events
            if event["event"] == "machine_left"
        ]


@contextmanager
def running(
    tmp_path,
    num_own=0,
    answers=lambda index: "ok",
    eval_answers=(),
    listen="127.0.0.1:*",
    publishes=True,
    num_floats=4,
    **options,
):
    """A run that listens, with its first weights published, if it `publishes` them."""
    defaults = {"groups_per_step": 2, "group_size": 2, "timeout_s": 60.0, "listen": "127.0.0.1:1", "async_ratio": 1.0,
        "runs_dir": str(tmp_path.parent)}  # fmt: skip
    config = Config(**{**defaults, "num_rollout_workers": num_own, **options})
    prompts = PromptSource(
        train_problem=lambda index: Problem(f"p{index}", answers(index)),
        eval_problems=[Problem(f"e{i}", answer) for i, answer in enumerate(eval_answers)],
        encode=lambda problem: [2, 3],
    )
    events, model = [], tmp_path / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(MODEL_CONFIG)
    record = lambda event, **fields: events.append({"event": event, **fields})  # noqa: E731
    placement = Placement(
        (None,), 1, tuple(WorkerPlacement(i, None, None, 1, 0.0) for i in range(num_own)), "shm"
    )
    workers = SwarmWorkers(config, placement, "fine", tmp_path, run_fake_worker)
    controller = SwarmController(config, workers, BaselineTickets(config, prompts), record)
    directory = SimpleNamespace(record=record, path=Path(config.runs_dir) / "run")
    swarm = Swarm(config, str(model), listen, make_key(tmp_path / "swarm.key"), directory)
    controller.swarm = swarm
    specs = [ParameterSpec("w", torch.float32, (num_floats,))]
    try:
        controller.launch()
        controller.connect(ShmTransport(specs) if num_own else Transport(specs))
        run = Run(controller, swarm, tmp_path / "swarm.key", events, num_floats)
        if publishes:
            run.publish()
        yield run
    finally:
        controller.stop()


class FakeHost:
    """Speaks the protocol as a host does; tests make it lie, hold tickets back, and fall silent."""

    def __init__(self, run, name="far", num_engines=1, keys=None, rcvhwm=1000, **said):
        """`said` takes the place of fields of its Join."""
        self.link = Link((*TO_ENGINE, *TO_HOST), self.send_frames)
        self.send, self.lock, self.context = self.link.send, threading.Lock(), zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.linger, self.socket.rcvhwm = 500, rcvhwm
        self.socket.curve_serverkey, self.socket.curve_publickey, self.socket.curve_secretkey = (
            keys or read_key(run.key_path)
        )
        self.socket.connect(f"tcp://{run.address}")
        self.num_engines, self.seen, self.sent = num_engines, [], []
        self.holds = lambda ticket: False
        """Which tickets are not answered."""
        self.changes = lambda trajectory: trajectory
        """What its trajectories are made into."""
        self.answers_fetch = True
        self.held, self.had, self.versions = [], [], {}
        self.puller, self.wants = None, {}
        self.name = name
        self.said = dataclasses.replace(
            Join(PROTOCOL, code_digest(), "cpu", name, time.time()), **said
        )
        self.is_silent = self.is_closed = False
        self.thread = threading.Thread(target=self._serve, daemon=True)

    def join(self):
        self.send(self.said)
        return self

    def start(self):
        """Join and serve, in a thread."""
        self.join()
        self.thread.start()
        return self

    def __enter__(self):
        return self if self.thread.is_alive() else self.start()

    def __exit__(self, *_):
        self.close()

    def close(self):
        self.is_closed = True
        if self.thread.is_alive():
            self.thread.join()
        self.context.destroy()

    def send_frames(self, frames):
        with self.lock:
            self.sent.append(frames)
            # refused by its key, it has no connection any more
            with contextlib.suppress(zmq.Again):
                self.socket.send_multipart(frames, flags=zmq.DONTWAIT)

    def saw(self, kind):
        return [message for _, message in self.seen if isinstance(message, kind)]

    def finish(self, tickets=None, reason="stop"):
        """Answer tickets that it holds: each once, even where a test and its own thread ask for it at one time."""
        with self.lock:
            asked = [held for held in self.held if tickets is None or held[1].ticket_id in tickets]
            self.held = [held for held in self.held if held not in asked]
        for index, ticket in asked:
            made = [self.changes(t) for t in self.made(index, ticket, reason)]
            self.send(Finished(made, None), index)

    def made(self, index, ticket, reason="stop"):
        """All trajectories of a ticket."""
        spec = SimpleNamespace(placement=SimpleNamespace(worker=77))
        version = self.versions.get(index, 0)
        members = range(ticket.member, ticket.member + ticket.num_members)
        return [trajectory(ticket, version, spec, reason, member) for member in members]

    def _serve(self):
        while not self.is_closed:
            if self.is_silent or not self._receive():
                time.sleep(0.005)
            if self.saw(Welcome) and not self.saw(Refused) and not self.is_silent:
                self.link.beat()

    def _receive(self):
        """Act on a message, if one is there. Returns whether it was."""
        with self.lock:
            if not self.socket.poll(0):
                return False
            received = self.link.read(self.socket.recv_multipart())
        self.seen.append(received)
        self._act(*received)
        return True

    def _act(self, index, message):
        match message:
            case Welcome():
                for up in range(self.num_engines):
                    self.send(Ready(0.0), up)
            case Connect(init_info) if self.puller is None:
                self.puller = Puller(init_info, self.send)
            case Fetch(_, infos):
                self.wants[index] = infos[0]
                self._look_for_weights()
            case Piece():
                if self.puller.take(message):
                    self._look_for_weights()
            case Update(version, _, probe):
                self.versions[index] = version
                self.send(Updated(version, 0.001, SampledTokens(), None), index)
                if probe:
                    logprobs = tuple(np.full(len(tokens) - 1, -1, np.float32) for tokens in probe)
                    self.send(Probed(version, logprobs), index)
            case Tickets(tickets):
                self.had += tickets
                for ticket in tickets:
                    with self.lock:
                        self.held.append((index, ticket))
                    if not self.holds(ticket):
                        self.finish([ticket.ticket_id])
            case Abort(ticket_ids):
                self.finish(ticket_ids, "aborted")

    def _look_for_weights(self):
        here = self.puller.here
        for index, info in list(self.wants.items()):
            if here is not None and here.digest == info["digest"] and self.answers_fetch:
                del self.wants[index]
                self.send(Fetched(info["version"]), index)
        for info in self.wants.values():
            if self.puller.wanted is None and (here is None or here.digest != info["digest"]):
                self.puller.want(info)
