"""Why a node ends: by its own error, where there is no other node. extras/node_watch.py watches several."""

from collections.abc import Callable
from dataclasses import dataclass

from asyncrl.cluster.cluster import Cluster


@dataclass
class NodeWatch:
    """The watch of the only node."""

    cluster: Cluster
    dump_stacks: Callable[[], str]
    """Called when a wait takes too long; returns where the stacks are."""
    reason: str | None = None
    """Why the first other node that ended badly did so."""

    def finish(self) -> None:
        """Wait for the good end of other nodes, after that of this node."""

    def explain(self, error: BaseException) -> BaseException:
        """Return the cause of this node's end; of a wait that took too long with the stacks of all processes."""
        if isinstance(error, RuntimeError) and "timed out" in str(error).lower():
            return RuntimeError(f"{error}; {self.dump_stacks()}")
        return error
