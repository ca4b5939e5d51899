"""What plans of memory change: the options and the placement of a run on GPUs.

Importing this costs nothing; the plans import torch.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.plugins import Plugin

if TYPE_CHECKING:
    from asyncrl.cluster.cluster import Cluster
    from asyncrl.cluster.placement import Placement
    from asyncrl.config import Config
    from asyncrl.job.node import Rank


class PlanningPlugin(Plugin):
    """Fits a run into the memory of its GPUs, and names the script that gives advice."""

    def fit_memory(
        self, config: "Config", placement: "Placement", model_path: str, cluster: "Cluster"
    ) -> "tuple[Config, Placement]":
        """Return the options with savings, and the placement with the engine's share; see `fit`."""
        from extras.planning.fit import fit

        return fit(config, placement, model_path, cluster)

    def limit_memory(self, rank: "Rank") -> None:
        """Limit the trainer to its part of a shared GPU; see `leave_room`."""
        from extras.planning.fit import leave_room

        leave_room(rank)

    def check_tp(self, model_path: str, rollout_tp: int) -> None:
        """Raise ValueError, in one line, if a model cannot be split over `rollout_tp` GPUs."""
        from extras.planning.memory import check_tp
        from extras.planning.shape import read_shape

        check_tp(read_shape(model_path), rollout_tp)

    def on_end(self, run_path: Path) -> None:
        """Name the script that gives advice."""
        print(f"for advice on α and the split of devices: python scripts/advise.py {run_path}")


PLUGIN = PlanningPlugin()
