"""A run that hosts join, and hosts whose engines are made up: a real controller, real sockets, and faults between."""

import contextlib
import dataclasses
import itertools
import multiprocessing
import queue
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import zmq
from fake_worker import run_fake_worker

from asyncrl.cluster.fingerprint import code_digest
from asyncrl.cluster.placement import Placement, WorkerPlacement
from asyncrl.config import Config
from asyncrl.controller.prompts import PromptSource
from asyncrl.messages import Finished
from asyncrl.weights.shm import ShmTransport
from asyncrl.weights.transport import Announcement, ParameterSpec, Transport
from data.problem import Problem
from extras.baselines import BaselineTickets
from extras.swarm.controller import SwarmController
from extras.swarm.hub import make_key
from extras.swarm.join import Arguments, JoinedHost
from extras.swarm.link import Link
from extras.swarm.remote import SwarmWorkers
from extras.swarm.swarm import Swarm
from extras.swarm.wire import (
    HOST,
    PROTOCOL,
    SILENCE_S,
    TO_ENGINE,
    TO_HOST,
    Join,
    read_key,
)

PROBE = ((2, 3, 5),)
MODEL_CONFIG = '{"model_type": "llama", "vocab_size": 16}'


class Run:
    """A controller and its swarm, and the trainer's part in their protocol."""

    def __init__(self, controller, swarm, folder, events, num_floats):
        self.controller, self.swarm, self.folder = controller, swarm, folder
        self.events, self.num_floats = events, num_floats
        self.address, self.key_path = f"127.0.0.1:{swarm.hub.port}", folder / "swarm.key"
        self.version, self.trained, self.value_of, self.probe = -1, [], float, ()

    def publish(self, evaluate=False):
        self.version += 1
        evaluate |= self.controller.take_back_deferred()
        weights = torch.full((self.num_floats,), self.value_of(self.version))
        staged = self.controller.stage(self.version, [("w", weights)])
        self.controller.announce_or_defer(
            Announcement(self.version, self.version, staged, self.probe, evaluate)
        )

    def step(self):
        """Take a batch and publish the next version. The ledger balances, and nothing is trained on twice."""
        with self.controller.lock:
            self.controller.wait_for_batch()
            groups = self.controller.consume_batch()
        return self._train(groups)

    def step_if_ready(self):
        """The same, unless that would have to wait."""
        self.controller.take_metrics()  # raises what ended the swarm's thread
        if self.controller.hold_batch():
            self._train(self.controller.consume_batch())

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
        return {ticket_id for ticket_id, _ in self.trained}

    def metric(self, name):
        return self.swarm.take_metrics()[f"swarm/{name}"]

    def workers_of(self, name):
        """Numbers of the workers of hosts of a name, in order."""
        started = [event for event in self.events if event["event"] == "worker_started"]
        return [event["worker"] for event in started if event.get("machine") == name]

    def left(self):
        """Hosts that have left or were shut out, and why."""
        left = [event for event in self.events if event["event"] == "machine_left"]
        return [(event["machine"], event["why"]) for event in left]


@contextlib.contextmanager
def running(
    tmp_path,
    num_own=0,
    num_eval=0,
    listen="127.0.0.1:*",
    publishes=True,
    num_floats=4,
    **options,
):
    """A run that listens, with its first weights published, if it `publishes` them. All engines are threads."""
    defaults = {"groups_per_step": 2, "group_size": 2, "timeout_s": 60.0, "listen": "127.0.0.1:1", "async_ratio": 1.0,
        "runs_dir": str(tmp_path.parent), "steps": 10**6}  # fmt: skip
    config = Config(**{**defaults, "num_rollout_workers": num_own, **options})
    prompts = PromptSource(
        train_problem=lambda index: Problem(f"p{index}", "ok"),
        eval_problems=[Problem(f"e{i}", "ok") for i in range(num_eval)],
        encode=lambda problem: [2, 3],
    )
    events, model = [], tmp_path / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(MODEL_CONFIG)
    record_event = lambda event, **fields: events.append({"event": event, **fields})  # noqa: E731
    own = tuple(WorkerPlacement(i, None, None, 1, 0.0) for i in range(num_own))
    placement = Placement((None,), 1, own, "shm")
    workers = SwarmWorkers(config, placement, "fine", tmp_path, run_fake_worker)
    controller = SwarmController(config, workers, BaselineTickets(config, prompts), record_event)
    directory = SimpleNamespace(record_event=record_event, path=Path(config.runs_dir) / "run")
    swarm = Swarm(config, str(model), listen, make_key(tmp_path / "swarm.key"), directory)
    controller.swarm = swarm
    specs = [ParameterSpec("w", torch.float32, (num_floats,))]
    with pytest.MonkeyPatch.context() as patch:
        for module in ("asyncrl.controller.workers", "extras.swarm.host_engine"):
            patch.setattr(f"{module}.WorkerProcess", ThreadProcess)
        try:
            controller.launch()
            controller.connect(ShmTransport(specs) if num_own else Transport(specs))
            run = Run(controller, swarm, tmp_path, events, num_floats)
            if publishes:
                run.publish()
            yield run
        finally:
            controller.stop()


class ThreadProcess:
    """Stands where a worker's process does: the worker runs in a thread."""

    def __init__(self, spec, main, hear, threads):
        self.spec, self.started_at = spec, time.monotonic()
        self._near, far = multiprocessing.Pipe()
        threads.submit(self._serve, main, far)
        self.reading = threads.submit(self._listen, hear)

    def _serve(self, main, connection):
        with connection:
            main(self.spec, connection)

    def _listen(self, hear):
        try:
            while True:
                hear(self._near.recv())
        except (EOFError, OSError):
            hear(None)

    def send(self, message):
        with contextlib.suppress(OSError):  # it has ended
            self._near.send(message)

    def stop(self, timeout_s=0): ...

    def death_line(self):
        return "the engine has died"

    death_report = death_line


class Far(JoinedHost):
    """A real host, served in a thread, whose engines are threads; tests hold back and change what it says."""

    numbers = itertools.count()

    def __init__(self, run, name="far", rollout_tp=None):
        self.name, self.ended = name, []
        folder = run.folder / f"host_{next(self.numbers)}"
        folder.mkdir()
        given = Arguments(run.address, str(run.key_path), rollout_tp=rollout_tp)
        super().__init__(given, run_fake_worker, folder)
        self.heard = []
        self.holds = ()
        """Kinds of messages that engines say only when the test has them `finish`."""
        self.held = []
        self.changes = lambda message: [message]
        """What is sent for each message: others, or frames."""
        self._to_do = queue.SimpleQueue()
        self._say_plainly, self.connection.link.send = self.connection.link.send, self._say
        self.thread = threading.Thread(target=self._serve, daemon=True)

    # For tests

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.leave()

    def saw(self, kind):
        """Messages of a kind that came."""
        return [message for message in self.heard if isinstance(message, kind)]

    def do(self, action):
        """Have something done in its thread."""
        self._to_do.put(action)
        self._wake()

    def say(self, message, engine=HOST):
        self.do(lambda: self._say_plainly(message, engine))

    def finish(self):
        """Have engines say what is held."""
        self.do(self._finish)

    @property
    def held_tickets(self):
        """Ids of tickets of which the answers are held."""
        answers = [message for _, message in self.held if isinstance(message, Finished)]
        return {t.ticket_id for answer in answers for t in answer.trajectories}

    def leave(self):
        """Leave the run in order, unless it has ended already."""
        self.stop()
        self.thread.join(30)

    def die(self):
        """End without a word."""
        self.do(self._die)
        self.thread.join(30)

    def end(self):
        """Wait for its end. Returns why it ended."""
        self.thread.join(30)
        (why,) = self.ended
        return why

    # In its thread

    def drop(self):
        """Lose the connection."""
        address = f"tcp://{self.connection.address}"
        self.connection.socket.disconnect(address)
        self.connection.socket.connect(address)

    def miss_run(self):
        """Hear nothing of the run for too long."""
        self.connection.link.heard_at -= 2 * SILENCE_S
        self._keep_in_touch()

    def _serve(self):
        try:
            self.ended.append(self.serve())
        except Exception as error:  # whatever it is, the test looks at it
            self.ended.append(error)
        self.close()

    def _die(self):
        self.connection.socket.disable_monitor()
        self.connection.socket.close(0)
        self.connection.socket = None
        raise InterruptedError

    def _finish(self):
        self.holds = ()
        for engine, message in self.held:
            super()._hear(engine, message)
        self.held.clear()

    def _hear(self, engine, message):
        self.do(lambda: self._hold_or_hear(engine, message))

    def _hold_or_hear(self, engine, message):
        if isinstance(message, self.holds):
            self.held.append((engine, message))
        else:
            super()._hear(engine, message)

    def _hear_engines(self):
        while not self._to_do.empty():
            self._to_do.get()()
        super()._hear_engines()

    def _say(self, message, engine=HOST):
        if isinstance(message, Join):
            message = dataclasses.replace(message, host=self.name)
        for sent in self.changes(message):
            if isinstance(sent, list):
                self.connection.socket.send_multipart(sent)
            else:
                self._say_plainly(sent, engine)

    def _act(self, engine, message):
        self.heard.append(message)
        return super()._act(engine, message)


class Client:
    """A bare connection with the key of a run; it says what it is told to, and nothing by itself."""

    def __init__(self, run, rcvhwm=1000):
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.linger, self.socket.rcvhwm = 0, rcvhwm
        keys = read_key(str(run.key_path))
        self.socket.curve_serverkey, self.socket.curve_publickey, self.socket.curve_secretkey = keys
        self.socket.connect(f"tcp://{run.address}")
        self.link = Link((*TO_ENGINE, *TO_HOST), self.socket.send_multipart)
        self.send = self.link.send
        self.heard = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.context.destroy()

    def join(self, name):
        self.send(Join(PROTOCOL, code_digest(), "cpu", name, time.time()))

    def saw(self, kind):
        """Messages of a kind that have come until now."""
        while self.socket.poll(0):
            self.heard.append(self.link.read(self.socket.recv_multipart())[1])
        return [message for message in self.heard if isinstance(message, kind)]
