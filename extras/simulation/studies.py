"""Studies of studies.toml as simulated cases."""

import tomllib
from dataclasses import dataclass, replace
from pathlib import Path

from extras.latency_law import LatencyLaw
from extras.simulation.cluster import Case, train_s_per_token
from extras.simulation.engine import BYTES_PER_VALUE, MODELS, Cluster, Swarm, roofline
from extras.simulation.workload import LengthLaw, Turns, Workload, lengths_up_to

STUDIES = Path(__file__).with_name("studies.toml")
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
        model = fields.get("model", "Qwen3-8B")
        curve = roofline(model, fields.get("gpu", "H800"), lengths.mean_context)
        slots = fields["options"].get("max_running_requests", curve.max_running_requests)
        curve = replace(curve, max_running_requests=slots).scaled(
            replicas=fields.get("replicas", 1)
        )
        weight_bytes = BYTES_PER_VALUE * MODELS[model].num_parameters
        train_s = sync_s = 0.0
        if "train_gpus" in fields:
            train_s = train_s_per_token(model, "H800", fields["train_gpus"])
            sync_s = weight_bytes / SYNC_BYTES_PER_S
        swarm = Swarm(weight_bytes, **fields["swarm"]) if "swarm" in fields else None
        return Cluster(
            curve, fields["workers"], train_s, sync_s, fields.get("message_s", 0.0), swarm
        )


def read_studies() -> dict[str, dict]:
    """Return the studies of the file by name."""
    file = tomllib.loads(STUDIES.read_text(encoding="utf-8"))
    return {study["name"]: study for study in file["study"]}


def settings(only: list[str] | None = None) -> list[Setting]:
    """Return the settings of all studies, or of those in `only`. Raises ValueError for an unknown name."""
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
