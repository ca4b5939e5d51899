"""Messages of the engines of hosts: each is checked, and then the controller acts on it as on any worker's."""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace

from asyncrl.config import Config
from asyncrl.controller.workers import Worker
from asyncrl.messages import Finished, Probed, Ready, WeightsLoaded
from asyncrl.records import Ticket, Trajectory
from extras.swarm.controller import SwarmController
from extras.swarm.members import Host
from extras.swarm.remote import RemoteProcess
from extras.swarm.trust import find_mistake
from extras.swarm.wire import Fetched


class Intake:
    """Checks messages of engines. A ValueError means that no honest host sends such a message."""

    def __init__(self, config: Config, controller: SwarmController, model_path: str):
        """The model's folder tells how many tokens there are."""
        from transformers import AutoConfig  # takes seconds to import

        self._config, self._controller = config, controller
        model = AutoConfig.from_pretrained(model_path, trust_remote_code=False)
        self._vocab_size = model.get_text_config().vocab_size
        self._answered: deque[tuple[Ticket, Trajectory]] = deque()

    def take_answered(self) -> list[tuple[Ticket, Trajectory]]:
        """Take the trajectories of hosts since the last call, each with its ticket; empty with verify_share 0."""
        return [self._answered.popleft() for _ in range(len(self._answered))]

    def start_engine(self, host: Host, ready: Ready, post: Callable[[object], None]) -> Worker:
        """Make a worker of a host's engine that is up. `post(message)` sends a message to it; never waits."""
        if not 0 <= ready.startup_s < 1e9:
            raise ValueError(f"{ready.startup_s:.4g} s as the time to start")
        process = RemoteProcess(post)
        return self._controller.let_in(process, host.name, scores_probe=not host.engines)

    def receive(self, host: Host, worker: Worker, message: object) -> None:
        """Check a message of an engine that is up, and give it to the controller."""
        match message:
            case Ready():
                raise ValueError("Ready of an engine that is up")
            case Fetched() | WeightsLoaded() | Probed():
                worker.process.check_answer(message)
            case Finished(trajectories):
                self._check(worker, trajectories)
                newest = self._controller.announcements.newest.version
                adopted = [host.adopt(t, worker.index, newest) for t in trajectories]
                message = Finished(adopted, None)
                if self._config.swarm.verify_share:
                    self._answered.extend((worker.tickets[t.ticket_id], t) for t in adopted)
        if isinstance(message, WeightsLoaded):
            # its clock is another one, so it keeps no time ledger here
            message = replace(message, activity=None)
        self._controller.on_message(worker, message)

    def _check(self, worker: Worker, trajectories: list[Trajectory]) -> None:
        """Raise ValueError for trajectories that do not fit the worker's tickets."""
        dispatcher = self._controller.dispatcher
        members = Counter((trajectory.ticket_id, trajectory.member) for trajectory in trajectories)
        counts = Counter(trajectory.ticket_id for trajectory in trajectories)
        for trajectory in trajectories:
            ticket = worker.tickets.get(trajectory.ticket_id)
            is_whole = ticket is not None and counts[ticket.ticket_id] == ticket.num_members
            if not is_whole or max(members.values()) > 1:
                raise ValueError(
                    f"trajectories of ticket {trajectory.ticket_id}, which it has not, or not all of them"
                )
            if trajectory.finish_reason == "aborted" and dispatcher.is_awaited(worker, ticket):
                raise ValueError(
                    f"ticket {ticket.ticket_id} as aborted, which it was not told to abort"
                )
            asked = replace(ticket, min_version=dispatcher.needed_version(ticket))
            newest, vocab_size = worker.sent_version, self._vocab_size
            if why := find_mistake(trajectory, asked, self._config, newest, vocab_size):
                raise ValueError(f"of ticket {ticket.ticket_id} {why}")
