"""The swarm: hosts that join a run while it goes, sample for it, and leave (Echo, arXiv 2508.05387).

A host that joins is one or more `Worker`s whose pipe is a socket and whose weights are pulled; dispatcher, buffer
and ledger do not know the difference. A host that leaves, dies or falls silent is the death of its workers, whose
tickets are issued again; what it says afterwards is late, and only counted.

What comes is checked before anybody acts on it: a host that says what no honest one can say is shut out.
"""

import functools
import itertools
import socket
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from asyncrl.cluster.gpus import visible_gpus
from asyncrl.config import ChangeableBy, Config, options_changeable_by
from asyncrl.controller.workers import Worker
from asyncrl.messages import Finished, Probed, Ready, Update, Updated, decoded_lengths
from asyncrl.records import Ticket, Trajectory
from asyncrl.runlog.metrics import Measured, Sum
from asyncrl.runlog.run_directory import RunDirectory
from asyncrl.user_code import user_code_names, with_absolute_paths
from asyncrl.weights.transport import ParameterSpec
from extras.swarm.controller import Disbelieved, SwarmController
from extras.swarm.hub import Hub, make_key
from extras.swarm.link import Link
from extras.swarm.model_files import model_files
from extras.swarm.pull import KEPT, PIECE_BYTES, PullTransport
from extras.swarm.snapshots import SnapshotWriter
from extras.swarm.trust import mistake_in
from extras.swarm.wire import (
    FROM_ENGINE,
    FROM_HOST,
    HOST,
    PROTOCOL,
    Beat,
    Fetch,
    Fetched,
    Join,
    JoinAgain,
    JoinAt,
    Leave,
    Piece,
    Pull,
    Refused,
    Welcome,
    code_digest,
    user_code_digest,
)

if TYPE_CHECKING:
    from asyncrl.job.node import Leader

MAX_ENGINES = 256
"""Of one host."""
MAX_FAILED = 16
"""Trajectories that may fail one after the other on one host."""
MAX_SHOWN = 300
"""Characters of what a host that is not believed has sent."""
MAX_NAMED = 16
"""Hosts of which metrics tell one by one; events tell of all."""


class RemoteProcess:
    """An engine of a host that has joined, with the calls of WorkerProcess; knows what answers it owes."""

    exit_code = None

    def __init__(self, post: Callable[[object], None], name: str):
        self._post, self.name = post, name
        self.started_at = time.monotonic()
        # answer and version -> shapes of the arrays that are to be in it
        self._due: dict[tuple[type, int], list[tuple[int, ...]]] = {}

    def send(self, message: object) -> None:
        """Queue a message; never waits."""
        match message:
            case Fetch(version):  # in place of one that is gone, if it has not come
                self._due = {
                    due: shapes for due, shapes in self._due.items() if due[0] is not Fetched
                }
                self._due[Fetched, version] = []
            case Update(version, _, probe):
                self._due[Updated, version] = []
                if probe:
                    lengths = decoded_lengths(probe)
                    shapes = [(len(tokens) - 1,) for tokens in probe]
                    self._due[Probed, version] = shapes + [(2, length) for length in lengths]
        self._post(message)

    def check_answer(self, message: Fetched | Updated | Probed) -> None:
        """Raise ValueError for an answer to what was not asked."""
        shapes = self._due.pop((type(message), message.version), None)
        if shapes is None:
            raise ValueError(
                f"{type(message).__name__} of version {message.version}, which it was not asked for"
            )
        if isinstance(message, Updated):
            counts = vars(message.sampled).values()
            if not (0 <= message.pause_s < 1e6 and min(counts) >= 0 and max(counts) < 1e12):
                raise ValueError(f"an update of {message.pause_s:.4g} s with {message.sampled}")
        elif isinstance(message, Probed):
            arrays = [*message.logprobs, *message.decoded]
            if [scores.shape for scores in arrays] != shapes:
                raise ValueError("log-probs of a probe in other shapes than its tokens")
            if not all(
                scores.dtype == np.float32 and np.isfinite(scores).all() for scores in arrays
            ):
                raise ValueError("log-probs of a probe that are not finite float32")

    def stop(self, timeout_s: float) -> None:
        """Nothing: it was told, and nobody waits for a remote host."""

    def death_report(self) -> str:
        """Who it is."""
        return f"{self.name} has left"


@dataclass
class Host:
    """A host that has joined."""

    identity: bytes
    link: Link
    name: str = "a stranger"
    """Its host name, with a number where another has the same."""
    clock_ahead_s: float = 0.0
    engines: dict[int, Worker] = field(default_factory=dict)
    """Those that are up."""
    is_pulling: bool = False
    num_failed: int = 0
    """Trajectories that failed since one did not."""
    counts: Counter[str] = field(default_factory=Counter)
    """What it did since the last report: tokens, trajectories, and their lags."""

    def take(self, trajectory: Trajectory, worker: int, newest_version: int) -> Trajectory:
        """Count a trajectory. Returns it with its worker's number and its times as they are here.

        Raises ValueError if too many have failed.
        """
        self.num_failed = self.num_failed + 1 if trajectory.finish_reason == "failed" else 0
        if self.num_failed > MAX_FAILED:
            raise ValueError(
                f"{MAX_FAILED} failed trajectories one after the other, the last by {trajectory.failure}"
            )
        # Its Join may have waited, which looks like a clock that is behind; no trajectory ends in the future.
        self.clock_ahead_s = max(self.clock_ahead_s, trajectory.ended_at - time.time())
        if trajectory.num_generated:
            lag = newest_version - trajectory.oldest_version
            self.counts.update(trajectories=1, tokens=trajectory.num_generated, lags=lag)
        return replace(
            trajectory,
            worker=worker,
            started_at=trajectory.started_at - self.clock_ahead_s,
            ended_at=trajectory.ended_at - self.clock_ahead_s,
            turns=tuple(tuple(at - self.clock_ahead_s for at in turn) for turn in trajectory.turns),
        )


class Swarm:
    """Listens for hosts, and carries messages between them and the controller."""

    def __init__(
        self,
        config: Config,
        model_path: str,
        address: str,
        keys: tuple[bytes, bytes, bytes],
        run: RunDirectory,
    ):
        """Listen at HOST:PORT with the run's keys, and write events to `run`.

        Raises ValueError if the address is taken, or snapshots cannot be written where --swarm.snapshots says.
        """
        self.config, self.record, self._model_path = config, run.record, model_path
        self._device = "cuda" if visible_gpus() else "cpu"
        self.code = code_digest()
        self.welcome = Welcome(
            _shared(config), model_files(model_path), user_code_digest(user_code_names(config))
        )
        snapshots = f"{config.swarm.snapshots}/{run.path.relative_to(config.runs_dir)}"
        self._writer = SnapshotWriter(snapshots) if config.swarm.snapshots else None
        self.hub = Hub(address, keys)
        self.nodes: list[tuple[str, int]] = []
        """Where each node of the run listens, and how many rollout workers it has itself; for the first node, whom all
        hosts ask, and empty on the others."""
        self.num_joined: Counter[int] = Counter()
        """Workers of hosts that have joined each of them, as far as this node knows."""
        self._counts: Counter[str] = Counter()
        self._reported_at = time.monotonic()
        self._hosts: dict[bytes, Host] = {}
        self._shut_out: set[bytes] = set()
        self._identity_of: dict[int, bytes] = {}  # of all workers that there were
        self._answered: deque[tuple[Ticket, Trajectory]] = deque()
        self.verified: Measured = {}
        """Metrics of what was verified (verify.py)."""
        self._encoding = ThreadPoolExecutor(1)

    def make_transport(self, specs: list[ParameterSpec]) -> PullTransport:
        """Make what brings weights to hosts."""
        return PullTransport(specs, self._writer, max(KEPT, self.config.swarm.refresh_lag + 2))

    def start(self, controller: SwarmController) -> None:
        """Let hosts in."""
        self.controller = controller
        self._vocab_size = _vocab_size(self._model_path)
        controller.workers.watch(self.hub.start(self._receive, self._beat, self._end))

    def stop(self) -> None:
        """Tell all hosts that the run has ended, and listen no more."""
        self.hub.stop()
        self._encoding.shutdown()

    def shut_out(self, worker: int, why: str) -> None:
        """Believe nothing any more that the host of a worker has sampled, and let it in no more."""
        identity = self._identity_of[worker]
        if identity not in self._shut_out:
            self._shut_out.add(identity)
            self.hub.do_soon(functools.partial(self._lose_liar, identity, why))

    @property
    def disbelieved(self) -> set[int]:
        """Workers of the hosts that were shut out, also of those that had left before."""
        identities = list(self._identity_of.items())
        return {worker for worker, identity in identities if identity in self._shut_out}

    def take_answered(self) -> list[tuple[Ticket, Trajectory]]:
        """Take what hosts have sampled since the last call, each with its ticket."""
        return [self._answered.popleft() for _ in range(len(self._answered))]

    def take_metrics(self) -> Measured:
        """Take the metrics `swarm/*` of what hosts did since the last call."""
        hosts, metrics = list(self._hosts.values()), {}
        now, since = time.monotonic(), self._reported_at
        self._reported_at = now
        for host in hosts:
            counts, host.counts = host.counts, Counter()
            measured = _metrics(counts + self._count_bytes(host), now - since)
            self.record(
                "machine",
                machine=host.name,
                workers=[w.index for w in host.engines.values()],
                **measured,
            )
            if len(hosts) <= MAX_NAMED:
                metrics |= {
                    f"swarm/{host.name}/{name}": Sum(value) for name, value in measured.items()
                }
        metrics |= self.verified | {f"swarm/{name}": Sum(self._counts[name]) for name in COUNTS}
        return metrics | {"swarm/machines": Sum(len(hosts)), "swarm/workers": Sum(self.num_workers)}

    @property
    def num_workers(self) -> int:
        """Engines of hosts that have joined this node."""
        return sum(len(host.engines) for host in list(self._hosts.values()))

    def _count_bytes(self, host: Host) -> Counter[str]:
        """Return megabytes sent and received since the last call."""
        num_bytes, host.link.num_bytes = host.link.num_bytes, Counter()
        counts = Counter({f"mb_{direction}": count / 1e6 for direction, count in num_bytes.items()})
        self._counts.update(counts)
        return counts

    # In the hub's thread

    def _send_frames(self, identity: bytes, frames: list[bytes]) -> None:
        why = self.hub.send([identity, *frames])
        if why is not None and identity in self._hosts:
            self._lose(self._hosts[identity], f"cannot be reached ({why})")

    def _send_if_there(self, host: Host, message: object, engine: int = HOST) -> None:
        if self._hosts.get(host.identity) is host:
            host.link.send(message, engine)

    def _receive(self, frames: list[bytes]) -> None:
        identity = frames[0]
        if identity in self._shut_out:
            return
        host = self._hosts.get(identity)
        if host is None:
            link = Link((*FROM_ENGINE, *FROM_HOST), functools.partial(self._send_frames, identity))
            host = Host(identity, link)
        try:
            engine, message = host.link.read(frames[1:])
            if isinstance(message, Join):
                self._let_in(host, message)
            elif identity not in self._hosts:
                self._on_stranger(host, message)
            else:
                self._act(host, engine, message)
        except ValueError as error:
            if identity not in self._hosts:
                self._take_in(host)
            self._lose(host, f"sent {error}", is_believed=False)

    def _let_in(self, host: Host, join: Join) -> None:
        if host.identity in self._hosts:
            raise ValueError("a Join after its Join")
        if not 0 <= join.unix_time < 1e11:
            raise ValueError(f"{join.unix_time:.4g} as its clock")
        host.name, why = _shown(join.host[:64]).replace("/", "_"), None
        if join.protocol != PROTOCOL:
            why = (
                f"its protocol is {join.protocol}, the run's {PROTOCOL}; check out the same commit"
            )
        elif join.code != self.code:
            why = f"its code is {_shown(join.code[:12])}, the run's {self.code[:12]}; check out the same commit"
        elif join.device != self._device:
            why = f"it computes on {_shown(join.device)}, the run on {self._device}: their log-probs differ too much"
        if why is not None:
            print(f"swarm: {host.name} was refused: {why}", flush=True)
            host.link.send(Refused(why))
            return
        if self.nodes:
            node = min(
                range(len(self.nodes)), key=lambda node: self.nodes[node][1] + self.num_joined[node]
            )
            self.num_joined[node] += 1
            if node > 0:
                host.link.send(JoinAt(self.nodes[node][0]))
                return
        host.clock_ahead_s = join.unix_time - time.time()
        self._take_in(host)
        self.record("machine_joined", machine=host.name)
        print(f"swarm: {host.name} has joined", flush=True)
        host.link.send(self.welcome)

    def _take_in(self, host: Host) -> None:
        asked, taken = host.name, {other.name for other in self._hosts.values()}
        names = itertools.chain([asked], (f"{asked}.{number}" for number in itertools.count(2)))
        host.name = next(name for name in names if name not in taken)
        self._hosts[host.identity] = host
        self._counts["joins"] += 1

    def _on_stranger(self, host: Host, message: object) -> None:
        """Count what a host sends that was taken for gone, and have it join again."""
        if isinstance(message, Finished):
            self._counts["late"] += len(message.trajectories)
        if not isinstance(message, Leave):
            host.link.send(JoinAgain())

    def _act(self, host: Host, engine: int, message: object) -> None:
        match message:
            case Beat():
                return
            case Leave():
                self._lose(host, "has left")
            case Pull(version, base, offset):
                if host.is_pulling or offset < 0:
                    raise ValueError(
                        f"a Pull from byte {offset}" + " while it pulls" * host.is_pulling
                    )
                host.is_pulling = True
                opening = self._encoding.submit(self.controller.pulled.open, version, base)
                opening.add_done_callback(
                    lambda opened: self.hub.do_soon(lambda: self._answer(host, message, opened))
                )
            case Ready() if 0 <= engine < MAX_ENGINES and engine not in host.engines:
                self._start_engine(host, engine, message)
            case _ if engine in host.engines:
                self._pass_on(host, host.engines[engine], message)
            case _:
                raise ValueError(f"{type(message).__name__} of an engine {engine} that is not up")

    def _start_engine(self, host: Host, engine: int, ready: Ready) -> None:
        def post(message: object) -> None:
            self.hub.do_soon(functools.partial(self._send_if_there, host, message, engine))

        if not 0 <= ready.startup_s < 1e9:
            raise ValueError(f"{ready.startup_s:.4g} s as the time to start")
        process = RemoteProcess(post, f"engine {engine} of {host.name}")
        worker = self.controller.let_in(process, host.name, scores_probe=not host.engines)
        host.engines[engine] = worker
        self._identity_of[worker.index] = host.identity
        self.controller.on_message(worker, ready)

    def _pass_on(self, host: Host, worker: Worker, message: object) -> None:
        """Give the controller a message of an engine. Raises ValueError if no honest host sends it."""
        match message:
            case Ready():
                raise ValueError("Ready of an engine that is up")
            case Fetched() | Updated() | Probed():
                worker.process.check_answer(message)
            case Finished(trajectories):
                self._check(worker, trajectories)
                newest = self.controller.announcements.newest.version
                message = Finished([host.take(t, worker.index, newest) for t in trajectories], None)
                if self.config.swarm.verify_share:
                    self._answered.extend(
                        (worker.running[t.ticket_id], t) for t in message.trajectories
                    )
        # Its clock is not this machine's, so it keeps no time ledger here.
        self.controller.on_message(
            worker, replace(message, activity=None) if isinstance(message, Updated) else message
        )

    def _check(self, worker: Worker, trajectories: list[Trajectory]) -> None:
        """Raise ValueError for trajectories that are not what the worker's tickets asked for."""
        members = Counter((trajectory.ticket_id, trajectory.member) for trajectory in trajectories)
        counts = Counter(trajectory.ticket_id for trajectory in trajectories)
        for trajectory in trajectories:
            ticket = worker.running.get(trajectory.ticket_id)
            if (
                ticket is None
                or counts[ticket.ticket_id] != ticket.num_members
                or max(members.values()) > 1
            ):
                raise ValueError(
                    f"trajectories of ticket {trajectory.ticket_id}, which it has not, or not all of them"
                )
            if trajectory.finish_reason == "aborted" and self.controller.dispatcher.is_awaited(
                worker, ticket
            ):
                raise ValueError(
                    f"ticket {ticket.ticket_id} as aborted, which it was not told to abort"
                )
            asked = replace(ticket, min_version=self.controller.dispatcher.min_version(ticket))
            if why := mistake_in(
                trajectory, asked, self.config, worker.sent_version, self._vocab_size
            ):
                raise ValueError(f"of ticket {ticket.ticket_id} {why}")

    def _answer(self, host: Host, pull: Pull, opened: Future) -> None:
        host.is_pulling = False
        try:
            is_delta, stream = opened.result()
        except ValueError:
            # there are newer ones, and too many hosts that read older ones
            for worker in host.engines.values():
                self.controller.fetch_anew(worker, pull.version)
            return
        data = bytes(memoryview(stream)[pull.offset : pull.offset + PIECE_BYTES])
        self._send_if_there(host, Piece(pull.version, is_delta, len(stream), pull.offset, data))

    def _end(self) -> None:
        for host in list(self._hosts.values()):
            host.link.send(Leave())

    def _beat(self) -> None:
        for host in list(self._hosts.values()):
            if host.link.is_silent:
                self._lose(host, f"was silent for {host.link.silent_s:.0f} s")
            else:
                host.link.beat()
        self.controller.move_tickets()

    def _lose_liar(self, identity: bytes, why: str) -> None:
        """Shut a host out for what it sent earlier; it may have left since, and not have joined again."""
        host = self._hosts.get(identity)
        if host is not None:
            self._lose(host, why, is_believed=False)
        else:
            self._counts["shut_out"] += 1
            print(f"swarm: a host that has left {why}; it is let in no more", flush=True)

    def _lose(self, host: Host, why: str, is_believed: bool = True) -> None:
        """Take a host for gone: its workers have died. One that is not believed is also shut out."""
        if self._hosts.get(host.identity) is not host:
            return
        del self._hosts[host.identity]
        why, self._counts["leaves"] = _shown(why[:MAX_SHOWN]), self._counts["leaves"] + 1
        self._count_bytes(host)
        tickets = sum(len(worker.running) for worker in host.engines.values())
        self.record("machine_left", machine=host.name, why=why, tickets=tickets)
        print(f"swarm: {host.name} {why}; its {tickets} tickets are issued again", flush=True)
        if not is_believed:
            self._counts["shut_out"] += 1
            self._shut_out.add(host.identity)
            host.link.send(Refused(why))
        for worker in host.engines.values():
            self.controller.on_message(worker, None if is_believed else Disbelieved())


def _vocab_size(model_path: str) -> int:
    """Return the number of tokens that a model knows, from its config.json."""
    from transformers import AutoConfig  # takes seconds to import

    return (
        AutoConfig.from_pretrained(model_path, trust_remote_code=False).get_text_config().vocab_size
    )


def _shared(config: Config) -> dict:
    """Return the options that a host gets. What only the trainer reads has its default, and user code no folder.

    So hosts that wait for a run need not start again when it continues with other values of these.
    """
    return with_absolute_paths(config, Path("/")).as_dict() | {
        option.name: option.default for option in options_changeable_by(ChangeableBy.HOST)
    }


COUNTS = ("joins", "leaves", "shut_out", "late", "mb_sent", "mb_received")
"""Since the start of the run: hosts that joined, left and were shut out, trajectories that came after their host
was taken for gone, and 10⁶ bytes sent and received."""


def _shown(text: str) -> str:
    """What a stranger sent, for one line of a terminal."""
    return "".join(c if c.isprintable() else "?" for c in text)


def _metrics(counts: Counter[str], seconds: float) -> dict[str, float]:
    """What a host did in so many seconds."""
    metrics = {name: counts[name] for name in ("mb_sent", "mb_received")}
    metrics["tokens_per_s"] = counts["tokens"] / seconds
    return metrics | (
        {"lag": counts["lags"] / counts["trajectories"]} if counts["trajectories"] else {}
    )


def listen(leader: "Leader") -> Swarm:
    """Let remote hosts join that sample for a node; collective on leaders."""
    config, cluster, key_path = leader.config, leader.cluster, leader.run.path / "swarm.key"
    keys = cluster.gather(make_key(key_path) if cluster.is_first else None)[0]
    host, is_local = (
        config.listen.rpartition(":")[0],
        config.listen.startswith(("127.", "localhost:")),
    )
    address = config.listen if cluster.is_first else f"{host if is_local else '0.0.0.0'}:*"
    swarm = Swarm(config, leader.model_path, address, keys, leader.run)
    leader.on_end.callback(swarm.stop)
    is_named = is_local or (cluster.is_first and host not in ("0.0.0.0", "*"))
    where = f"{host if is_named else socket.gethostname()}:{swarm.hub.port}"
    nodes = cluster.gather((where, len(leader.placement.workers)))
    if cluster.is_first:
        swarm.nodes = nodes
        print(
            f"sample for this run on another host: python rollout.py --join {where} --key {key_path}",
            flush=True,
        )
    return swarm
