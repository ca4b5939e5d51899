"""Keeps the batch and the weights of a step whose loss or gradient is not finite, for scripts/replay.py."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from asyncrl.cluster.cluster import Cluster
from asyncrl.records import Group
from asyncrl.runlog.batches import batch_path, weights_sha256, write_batch
from asyncrl.trainer.policy import NotFinite, Policy


@contextmanager
def keep_what_fails(
    policy: Policy, cluster: Cluster, run_path: Path | None, step: int, groups: list[Group] | None
) -> Iterator[None]:
    """Train a step inside; what fails is kept, and the error says where. Collective if it fails, as all ranks do then.

    `run_path` is the run's directory, of leaders, who alone have `groups`. Weights are as they were before the update
    that failed: it touches none.
    """
    try:
        yield
    except NotFinite as error:
        path = run_path / f"failed_step_{step}" if cluster.is_first else None
        try:
            policy.save(str(path / "weights") if path else "")
            everyone = cluster.gather(groups) if cluster.is_leader else []
            if path:
                write_recording(path, run_path, step, [group for of_node in everyone for group in of_node])
        except OSError as failure:
            raise RuntimeError(f"{error}; its batch could not be kept: {failure}") from error
        where = f"; train on its batch again: python scripts/replay.py {path}" if path else ""
        raise RuntimeError(f"{error}{where}") from error


def write_recording(path: Path, run_path: Path, step: int, groups: list[Group]) -> None:
    """Make a recording, as of a run with --record, of one step whose weights are in `path`/weights."""
    write_batch(batch_path(path, step), step, groups)
    header = json.loads((run_path / "run.json").read_text(encoding="utf-8"))
    header["config"] |= {"model": str(path / "weights"), "steps": step}
    header |= {"weights_sha256": weights_sha256(str(path / "weights")), "first_step": step}
    (path / "run.json").write_text(json.dumps(header, indent=1) + "\n", encoding="utf-8")
