"""The reason why a node ends. extras/node_watch.py watches several nodes."""

from collections.abc import Callable
from dataclasses import dataclass

from asyncrl.cluster.cluster import Cluster


@dataclass
class NodeWatch:
    """The watch of the only node."""

    cluster: Cluster
    dump_stacks: Callable[[], str]
    """Called when a wait takes too long. Returns the place of the stacks."""
    reason: str | None = None
    """Reason of the first other node that failed."""

    def finish(self) -> None:
        """Wait until the other nodes have finished, after this node has."""

    def explain(self, error: BaseException) -> BaseException:
        """Return the cause of this node's end. After a timeout it names the option and the stacks."""
        if isinstance(error, RuntimeError) and "timed out" in str(error).lower():
            return RuntimeError(
                f"{error}; if a step or a checkpoint takes that long, raise --timeout-s; {self.dump_stacks()}"
            )
        return error
