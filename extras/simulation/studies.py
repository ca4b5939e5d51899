"""Studies of studies.toml as simulated cases."""

import tomllib
from dataclasses import dataclass
from pathlib import Path

from asyncrl.config import Config
from extras.latency_law import LatencyLaw
from extras.planning.planner import Job, Pool, read_sheets
from extras.planning.shape import ModelShape
from extras.simulation.cluster import Case
from extras.simulation.engine import Cluster, Swarm, roofline
from extras.simulation.workload import LengthLaw, Turns, Workload, lengths_up_to

FILE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
MAX_RUNNING_REQUESTS = 128
"""Most requests of an engine, if its memory holds as many: ROLL's default."""
FLOPS_PER_PARAMETER = 8
"""Operations of training on a token: 6 for forward and backward, 2 for the log-probs before the update."""
SYNC_BYTES_PER_S = 8e9
"""Weights to all engines: verl reports 59 s for 235B on 64 -> 64 GPUs."""


@dataclass(frozen=True)
class Setting:
    """One setting of a study."""

    study: str
    name: str
    fields: dict
    """See the top of studies.toml."""

    def case(self, seed: int) -> Case:
        """Return the run of this setting."""
        fields = self.fields
        ratio = int(fields["options"].get("async_ratio", 0))
        # Groups that start together also end together: one step in 1 + α is a long one.
        steps = -(-fields["steps"] // (1 + ratio)) * (1 + ratio)
        lengths = (
            LengthLaw(**fields["lengths"])
            if "lengths" in fields
            else lengths_up_to(fields["longest"])
        )
        turns = None
        if "latency" in fields:
            turns = Turns(latency=LatencyLaw.parse(fields["latency"]), **fields["turns"])
        hardware, warmup = self._cluster(lengths), fields.get("warmup", 2 + ratio)
        return Case(fields["options"], Workload(lengths, turns), hardware, steps, warmup, seed)

    def _cluster(self, lengths: LengthLaw) -> Cluster:
        fields = self.fields
        shape = ModelShape(**FILE["models"][fields.get("model", "Qwen3-8B")])
        options = {"max_running_requests": MAX_RUNNING_REQUESTS} | fields["options"]
        job = Job(Config.from_dict(options), shape, lengths.means)
        curve = roofline(job, pool_of(fields.get("gpu", "H800")))
        curve = curve.scaled(replicas=fields.get("replicas", 1))
        weight_bytes = 2 * shape.num_parameters
        train_s = sync_s = 0.0
        if "train_gpus" in fields:
            flops_per_s = pool_of("H800").flops_per_s * fields["train_gpus"]
            train_s = FLOPS_PER_PARAMETER * shape.num_parameters / flops_per_s
            sync_s = weight_bytes / SYNC_BYTES_PER_S
        swarm = Swarm(weight_bytes, **fields["swarm"]) if "swarm" in fields else None
        return Cluster(
            curve, fields["workers"], train_s, sync_s, fields.get("message_s", 0.0), swarm
        )


def pool_of(gpu: str) -> Pool:
    """Return one GPU of a data sheet."""
    sheet = (read_sheets() | FILE["gpus"])[gpu]
    return Pool(gpu, gpu, count=1, gpus=1, price_per_hour=0.0, **sheet)


def read_studies() -> dict[str, dict]:
    """Return the studies of the file by name."""
    return {study["name"]: study for study in FILE["study"]}


def settings(only: list[str] | None = None) -> list[Setting]:
    """Return the settings of all studies, or of the studies in `only`. Raises ValueError for an unknown name."""
    studies = read_studies()
    for name in only or ():
        if name not in studies:
            raise ValueError(f"--only {name!r} is none of {', '.join(map(repr, studies))}")
    return [
        Setting(name, setting["name"], _merged(study, setting))
        for name, study in studies.items()
        if not only or name in only
        for setting in study["settings"]
    ]


def _merged(study: dict, changes: dict) -> dict:
    tables = ("options", "swarm")
    nested = {name: study[name] | changes.get(name, {}) for name in tables if name in study}
    return study | changes | nested
