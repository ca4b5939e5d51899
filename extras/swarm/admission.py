"""Admission: a host that asks to join gets options and files of the model, another node's address, or a refusal."""

import socket
from pathlib import Path

from asyncrl.cluster.cluster import Cluster
from asyncrl.cluster.fingerprint import code_digest, digest
from asyncrl.cluster.gpus import visible_gpus
from asyncrl.config import ChangeableBy, Config, options_changeable_by
from asyncrl.user_code import files, user_code_names, with_absolute_paths
from extras.swarm.wire import (
    PROTOCOL,
    Join,
    JoinAt,
    Refused,
    Welcome,
    printable,
)

MODEL_FILES = (".json", ".jinja", ".txt", ".model", ".tiktoken")
"""Endings of configuration and tokenizer."""


class Admission:
    """Answers hosts that ask to join."""

    def __init__(self, config: Config, model_path: str):
        self._code = code_digest()
        self._device = "cuda" if visible_gpus() else "cpu"
        # Options of the trainer have their default, and user code has no folder. When a run continues with other values
        # of these, waiting hosts need not start again.
        defaults = {
            option.name: option.default for option in options_changeable_by(ChangeableBy.HOST)
        }
        options = with_absolute_paths(config, Path("/")).as_dict() | defaults
        model_files = {
            path.name: path.read_bytes()
            for path in sorted(Path(model_path).iterdir())
            if path.suffix in MODEL_FILES and not path.name.endswith(".index.json")
        }
        self._welcome = Welcome(options, model_files, digest(files(user_code_names(config))))
        self.addresses: list[str] = []
        """Address of each node of the run. Only the first node knows them: all hosts ask it first."""
        self.loads: list[int] = []
        """Rollout workers of each of these nodes, by the last count."""

    def answer(self, join: Join) -> Welcome | JoinAt | Refused:
        """Return the answer to a host: it joins here, or at the node with the fewest workers, or nowhere."""
        why = self._why_not(join)
        if why is not None:
            return Refused(why)
        if self.addresses:
            node = self.loads.index(min(self.loads))
            self.loads[node] += 1
            if node > 0:
                return JoinAt(self.addresses[node])
        return self._welcome

    def _why_not(self, join: Join) -> str | None:
        if join.protocol != PROTOCOL:
            return (
                f"its protocol is {join.protocol}, the run's {PROTOCOL}; check out the same commit"
            )
        if join.code != self._code:
            code = printable(join.code[:12])
            return f"its code is {code}, the run's {self._code[:12]}; check out the same commit"
        if join.device != self._device:
            device = printable(join.device)
            return f"it computes on {device}, the run on {self._device}: their log-probs differ too much"
        return None


def listening_address(listen: str, cluster: Cluster) -> str:
    """Return the address that a node listens at: --listen on the first node, else any free port."""
    if cluster.is_first:
        return listen
    return f"{listen.rpartition(':')[0] if _is_local(listen) else '0.0.0.0'}:*"


def public_address(listen: str, cluster: Cluster, port: int) -> str:
    """Return the address that hosts use to join a node."""
    host = listen.rpartition(":")[0]
    is_named = _is_local(listen) or (cluster.is_first and host not in ("0.0.0.0", "*"))
    return f"{host if is_named else socket.gethostname()}:{port}"


def _is_local(listen: str) -> bool:
    return listen.startswith(("127.", "localhost:"))
