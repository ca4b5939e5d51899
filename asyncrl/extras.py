"""The only place that names optional systems: a table from option to module of extras/.

A module is imported when its option is used. If its folder is deleted, the option ends in one line that reports it.
"""

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

from asyncrl import ROOT
from asyncrl.plugins import Plugin

MODULES = {
    "--listen": "extras.swarm.node",
    "--join": "extras.swarm.join",
    "--dry-run": "extras.planning.dry_run",
    "--scheduling": "extras.baselines",
    "--nnodes": "extras.node_watch",
    "--optim.seq-aux-loss-coef": "extras.moe.option",
    "--share-prefix": "extras.trees.option",
    "--certificate": "extras.certificate.option",
    "--router-replay": "extras.router_replay.option",
    "--gradient-cosine": "extras.gradient_cosine",
    "--dtype float16": "extras.loss_scale",
    "--record": "extras.recording",
    "--tracker": "extras.trackers",
    "--task agent": "extras.agents.worker",
    "--task environment": "extras.environments.option",
    "--resume on another number of nodes": "extras.redistribute",
    "planning": "extras.planning.fit",
    "advice": "extras.planning.advice",
}
ALWAYS = ("--optim.seq-aux-loss-coef", "--share-prefix", "--record", "planning")
"""Modules that every run uses if they are there, also without their option. They count the choices of routers, measure
shared prefixes, keep the batch of a failed step, and plan memory."""


def find_plugins(is_used: dict[str, Any]) -> list[Plugin]:
    """Return the plugins of options in use, in their order. Raises ValueError if one is missing."""
    modules = [
        load(option) if used else find(option)
        for option, used in is_used.items()
        if used or option in ALWAYS
    ]
    return [module.PLUGIN for module in modules if module is not None]


def load(option: str) -> ModuleType:
    """Return the module of an option. Raises ValueError if this copy of the code lacks it."""
    module = find(option)
    if module is None:
        path = MODULES[option].replace(".", "/")
        raise ValueError(
            f"{option} needs {path}.py, which this copy of the code lacks; bring the file back, or do without {option}"
        )
    return module


def find(option: str) -> ModuleType | None:
    """Return the module of an option; None if this copy of the code lacks it."""
    name = MODULES[option]
    is_there = Path(ROOT, name.replace(".", "/") + ".py").is_file()
    return importlib.import_module(name) if is_there else None
