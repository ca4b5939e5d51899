"""What a stale KV cache does to log-probs: `python scripts/stale_kv.py RUN …`, on the CPU, without an engine.

Under `--on-update keep` a token sampled after an update attends to keys and values that older weights computed, and its
log-prob is of that mixture: no version alone gives it. RUN is the directory of a run made with `--on-update keep
--record --save-every 1` (another mode is a control). Every trajectory that lived through an update is computed again by
transformers, once under each version that its tokens claim, from that step's checkpoint. Then, in nats per token,

    gap   = behavior log-prob − log-prob under the claimed version with a cache of its own
    step  = log-prob under the claimed version − log-prob under the version before it

`gap` is the error of taking the token for an exact sample of its version; `step` is how far one optimizer step moves
the same tokens' log-probs, the scale to read it by. One JSON line per run and number of updates that a token's sequence
had lived through when it was sampled; 0 updates is the control, where only rounding is left.
"""

import argparse
import json
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
import transformers

from data.models import resolve_model
from data.records import Trajectory
from records.batches import batch_path, read_batch

ROOT = Path(__file__).resolve().parent.parent

MAX_UPDATES = 3
"""Tokens that lived through this many updates or more are counted together."""
MAX_MODELS = 16
"""Versions that are kept in memory."""


class RecordedRun:
    """A recorded run and the weights of its versions."""

    def __init__(self, path: Path):
        """Raises ValueError for a directory that is no recorded run, or one whose tokens the trainer's plain softmax
        does not give."""
        self.path = path
        try:
            self.header = json.loads((path / "run.json").read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"{path} is not the directory of a run: {error}") from None
        self.config = self.header["config"]
        if not self.config.get("record") or self.config["save_every"] != 1:
            raise ValueError(f"{path} has not every batch and version; make the run with --record --save-every 1")
        if self.config["top_p"] != 1:
            raise ValueError(f"{path} was sampled with --top-p {self.config['top_p']}; make the run with --top-p 1")
        self._models: dict[int, object] = {}
        self.num_steps = len(list((path / "batches").iterdir()))

    def interrupted(self) -> list[Trajectory]:
        """All consumed trajectories with tokens of more than one version."""
        batches = (read_batch(batch_path(self.path, step), step) for step in range(1, self.num_steps + 1))
        trajectories = (t for groups in batches for group in groups for t in group.trajectories)
        return [t for t in trajectories if len(set(t.policy_versions[t.loss_mask].tolist())) > 1]

    def model(self, version: int):
        """The policy of a version, float32."""
        if version not in self._models:
            first = resolve_model(self.config["model"], self.config["task"])
            path = self.path / "checkpoints" / f"step_{version}" if version else first
            self._models[version] = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        while len(self._models) > MAX_MODELS:
            del self._models[next(iter(self._models))]
        return self._models[version]

    @torch.no_grad()
    def logprobs(self, trajectory: Trajectory, version: int) -> np.ndarray:
        """[T] nats of every token after those before it, under one version; the first is 0."""
        tokens = torch.from_numpy(trajectory.tokens)
        logits = self.model(version)(tokens[None]).logits[0, :-1].double() / self.config["temperature"]
        scores = torch.log_softmax(logits, -1).gather(1, tokens[1:, None])[:, 0]
        return np.concatenate([[0.0], scores.numpy()])


def gaps(run: RecordedRun, trajectory: Trajectory) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(gap [N] nats, step [N] nats, updates [N]) of the N tokens that the policy wrote; step is NaN at version 0."""
    versions = trajectory.policy_versions
    gap, step = np.full(len(versions), np.nan), np.full(len(versions), np.nan)
    distinct = sorted(set(versions[trajectory.loss_mask].tolist()))
    for version in distinct:
        claimed = versions == version
        own = run.logprobs(trajectory, version)
        gap[claimed] = (trajectory.behavior_logprobs - own)[claimed]
        if version:
            step[claimed] = (own - run.logprobs(trajectory, version - 1))[claimed]
    updates = np.searchsorted(distinct, versions)
    wrote = trajectory.loss_mask
    return gap[wrote], step[wrote], updates[wrote]


def measure(run: RecordedRun) -> list[dict]:
    """A record for each number of updates. Raises ValueError if no trajectory lived through one."""
    found = defaultdict(lambda: ([], []))
    trajectories = run.interrupted()
    if not trajectories:
        raise ValueError(f"{run.path}: no trajectory lived through an update; make a run with longer responses")
    for trajectory in trajectories:
        gap, step, updates = gaps(run, trajectory)
        for count in set(updates.tolist()):
            of_gap, of_step = found[min(count, MAX_UPDATES)]
            of_gap.extend(gap[updates == count])
            of_step.extend(step[updates == count])
    return [
        {"updates": count, "trajectories": len(trajectories), **summary(np.array(gap), np.array(step))}
        for count, (gap, step) in sorted(found.items())
    ]


def summary(gap: np.ndarray, step: np.ndarray) -> dict[str, float]:
    """What is reported of the tokens' gaps and steps, nats."""
    step = step[~np.isnan(step)]
    return {
        "tokens": len(gap),
        "gap_mean": float(gap.mean()),
        "gap_abs_mean": float(np.abs(gap).mean()),
        "gap_abs_p99": float(np.quantile(np.abs(gap), 0.99)),
        "gap_abs_max": float(np.abs(gap).max()),
        "step_abs_mean": float(np.abs(step).mean()) if len(step) else None,
    }


def table(records: list[dict]) -> str:
    """Markdown: a row per mode and number of updates."""
    columns = ("`--on-update`", "updates before", "tokens", "mean gap", "absolute", "99 %", "max", "a step moves")
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for r in records:
        updates = f"{r['updates']}{' or more' * (r['updates'] == MAX_UPDATES)}"
        values = [f"{r[key]:.1e}" for key in ("gap_mean", "gap_abs_mean", "gap_abs_p99", "gap_abs_max")]
        moved = "–" if r["step_abs_mean"] is None else f"{r['step_abs_mean']:.1e}"
        lines.append(f"| `{r['on_update']}` | {updates} | {r['tokens']} | {' | '.join(values)} | {moved} |")
    return "\n".join(lines)


def main() -> None:
    """Measure the runs and write records and table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="made with --record --save-every 1")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "stale_kv", help="folder of records and table")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    records = []
    try:
        for run in map(RecordedRun, arguments.runs):
            made_by = {key: run.header[key] for key in ("command", "git_commit", "hardware")}
            records += [{"on_update": run.config["on_update"], **r, **made_by} for r in measure(run)]
    except ValueError as error:
        parser.error(str(error))
    arguments.out.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(record) + "\n" for record in records]
    (arguments.out / "stale_kv.jsonl").write_text("".join(lines), encoding="utf-8")
    (arguments.out / "table.md").write_text(table(records) + "\n", encoding="utf-8")
    print(table(records))


if __name__ == "__main__":
    main()
