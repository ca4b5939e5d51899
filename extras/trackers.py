"""A second place for the metrics of a run: `--tracker wandb`, `trackio` or `tensorboard`.

A tracker has `log(metrics, step)` and `finish()`. A resumed run makes the steps after its checkpoint again. trackio and
TensorBoard then show the new metrics only.
"""

import contextlib
import importlib.util
import json
from pathlib import Path
from typing import Any

from asyncrl.config import Config, Rule
from asyncrl.plugins import Plugin

VERSIONS = {"wandb": "0.31.0", "tensorboard": "2.21.0", "trackio": "0.43.0"}
"""Packages that a run imports for its tracker only, as in requirements-common.txt and pyproject.toml."""
RULES: list[Rule] = [
    (
        lambda c: c.tracker not in ("wandb", "none") and c.tracker_mode == "offline",
        "--tracker-mode offline is for wandb, and --tracker {c.tracker} writes to this computer only; use "
        "--tracker-mode online",
    ),
    *(
        (
            lambda c, name=name: c.tracker == name and importlib.util.find_spec(name) is None,
            f"--tracker {name} needs the package {name}: pip install {name}=={version}",
        )
        for name, version in VERSIONS.items()
    ),
]


class TrackerPlugin(Plugin):
    """The changes of --tracker."""

    rules = RULES

    def start_tracker(
        self, config: Config, run_path: Path, run_id: str, resumed_from: int | None
    ) -> Any:
        """Begin or continue the run at the tracker. Raises ValueError, in one line, for what the tracker refuses."""
        start = {"wandb": start_wandb, "trackio": Trackio, "tensorboard": TensorBoard}
        return start[config.tracker](config, run_path, run_id, resumed_from)


PLUGIN = TrackerPlugin()


def start_wandb(config: Config, run_path: Path, run_id: str, resumed_from: int | None) -> Any:
    """Begin or continue the run at Weights & Biases.

    Online the server cuts a resumed run back to the checkpoint's step. Offline there is no record of the steps that are
    made again.
    """
    import wandb  # here, because only rank 0 writes

    run = {"id": run_id}
    if resumed_from is not None:
        moment = {"resume_from": f"{run_id}?_step={resumed_from}"}
        run = moment if config.tracker_mode == "online" else {"id": run_id, "resume": "allow"}
    settings = {
        "project": config.tracker_project,
        "name": run_path.name,
        "dir": str(run_path),
        "config": config.as_dict(),
    }
    try:
        return wandb.init(mode=config.tracker_mode, **settings, **run)
    except wandb.Error as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise ValueError(
            f"--tracker wandb: {reason}; run `wandb login`, set WANDB_API_KEY, or add --tracker-mode offline"
        ) from None


class Trackio:
    """The run in trackio's database, in the folder TRACKIO_DIR. `trackio show` draws it.

    trackio cannot cut a run back. So a resumed run begins again there, with the steps of metrics.jsonl.
    """

    def __init__(self, config: Config, run_path: Path, run_id: str, resumed_from: int | None):
        import trackio

        if resumed_from is not None:
            with contextlib.suppress(ValueError):  # The project can be new.
                for run in trackio.Api().runs(config.tracker_project):
                    if run.name.endswith(run_id):
                        run.delete()
        self._run = trackio.init(
            config.tracker_project,
            name=f"{run_path.name}-{run_id}",  # The folder can be moved, and its name is not unique.
            config=config.as_dict(),
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=False,
        )
        if resumed_from is not None:
            lines = (run_path / "metrics.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
            for metrics in map(json.loads, lines):
                if metrics["step"] <= resumed_from:
                    self.log(metrics, metrics["step"])

    def log(self, metrics: dict[str, Any], step: int) -> None:
        """Record the metrics of a step."""
        self._run.log(_numbers(metrics), step=step)

    def finish(self) -> None:
        """Write all metrics to the database."""
        self._run.finish()


class TensorBoard:
    """Event files in the run's folder tensorboard/. `tensorboard --logdir runs` draws all runs."""

    def __init__(self, config: Config, run_path: Path, run_id: str, resumed_from: int | None):
        from torch.utils.tensorboard import SummaryWriter

        purge_step = None if resumed_from is None else resumed_from + 1
        self._writer = SummaryWriter(str(run_path / "tensorboard"), purge_step=purge_step)

    def log(self, metrics: dict[str, Any], step: int) -> None:
        """Write the metrics of a step to the disk."""
        for name, value in _numbers(metrics).items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def finish(self) -> None:
        """Close the file."""
        self._writer.close()


def _numbers(metrics: dict[str, Any]) -> dict[str, float]:
    """Return the metrics that are numbers, without the step."""
    return {
        name: value
        for name, value in metrics.items()
        if isinstance(value, int | float) and name != "step"
    }
