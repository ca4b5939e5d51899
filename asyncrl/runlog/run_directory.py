"""The directory of a run: its header, metrics, events and some samples. A tracker can get the metrics, too.

run.json        run id, command, config, git commit and uncommitted changes, package versions, hardware, resumes
code/           copies of user code that the run and its resumes load
metrics.jsonl   one line per step, flat names with a slash
events.jsonl    spans and moments: trajectories, updates, steps, states of workers, deaths, how the run ended
samples.jsonl   readable trajectories
checkpoints/    step_N/: Hugging Face safetensors; its folder resume/ has the files for --resume
batches/        step_00000N.msgpack: the batch of each step; with --record only

A resume truncates the three .jsonl files to its checkpoint, also in the folders of other nodes. Files of later steps in
batches/ stay until their step is made again. Logs and failed_step_N/ stay.
"""

import json
import os
import secrets
import shutil
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from asyncrl.config import Config
from asyncrl.plugins import last_given
from asyncrl.runlog.header import make_header, read_run_id, write_header
from asyncrl.runlog.manifest import ResumePoint
from asyncrl.runlog.record_file import RecordFile
from asyncrl.user_code import run_name_part, with_absolute_paths, with_copied_files


class RunDirectory:
    """Writes the records of a run. Each line is written when the call returns. Threads can share it.

    Other nodes write run.json and events in a folder RUN/node_N, because options and hardware can differ. If nodes
    share no file system, their RUN has that folder only.
    """

    def __init__(
        self,
        config: Config,
        num_ranks: int = 1,
        *,
        gpus: Iterable[str] = (),
        node_folder: str = "",
        run_id: str | None = None,
        resume_point: ResumePoint | None = None,
    ):
        """Make the directory and write run.json.

        `gpus` are names of the node's GPUs. A node other than the first has `node_folder`, RUN/node_N, and the `run_id`
        of the first node. The name of a run that ended before its first step can be used again.
        A resumed run continues from `resume_point`. `continue_records` truncates the files to it. Before that no file
        is changed, and all lines are buffered.
        Raises ValueError if the name or the records are another run's, or if records would be cut within a line.
        """
        name = node_folder or config.run_name or _make_name(config)
        self.path = Path(config.runs_dir) / name
        is_new = resume_point is None
        if is_new:
            check_is_free(self.path)
            if self.path.exists():
                shutil.rmtree(self.path)
        # A node can be new in a resumed run.
        self.path.mkdir(parents=True, exist_ok=not is_new)
        self._is_first = not node_folder
        self._resume_point = resume_point
        self._files = self._open()
        """Record files by their names in the run."""
        self._config_as_given = config
        self.config = with_copied_files(config, self.path / "code") if is_new else config
        self._tracker = None
        if is_new and self._is_first:
            run_id = secrets.token_hex(8)
        self.run_id = run_id if is_new else self._check_run_id(run_id)
        """Each checkpoint of the run has it, too."""
        header = make_header(with_absolute_paths(config), num_ranks, gpus)
        self._header = {"run_id": self.run_id} | header
        if is_new:
            self._write_header_and_start_tracker()
            self.record_event("run_started")
        else:
            self.record_event("run_resumed", **asdict(resume_point))

    def _open(self) -> dict[str, RecordFile]:
        """Open the records by name.

        Raises ValueError if another process still writes them, or they would be truncated within a line.
        The first node opens records of absent nodes, too. It only truncates them.
        """
        record_bytes = self._resume_point.record_bytes if self._resume_point else None
        names = [self._events]
        if self._is_first:
            # A resume has the names of all files.
            names += ["metrics", "samples", *(record_bytes or ())]
        run_path = self.path if self._is_first else self.path.parent
        files = {
            name: RecordFile(
                run_path / f"{name}.jsonl",
                None if record_bytes is None else record_bytes.get(name, 0),
            )
            for name in dict.fromkeys(names)
            if (run_path / name).parent.exists()
        }
        if not files[self._events].lock():
            raise ValueError(
                f"{self.path} is written by a run that has not ended; end that one first"
            )
        return files

    @property
    def _events(self) -> str:
        """Name in the run of this node's events."""
        return "events" if self._is_first else f"{self.path.name}/events"

    def _check_run_id(self, run_id: str | None) -> str | None:
        """Return the id of the run that is resumed. Raises ValueError if the records are another run's."""
        recorded_id = read_run_id(self.path) if (self.path / "run.json").exists() else run_id
        if not self._is_first and recorded_id != run_id:
            raise ValueError(
                f"{self.path} is of run {recorded_id}, and the checkpoint of run {run_id}; move it away"
            )
        return recorded_id

    def _write_header_and_start_tracker(self) -> None:
        """Write run.json, and begin or continue the run at a tracker."""
        step = None if self._resume_point is None else self._resume_point.step
        write_header(self.path / "run.json", self._header, step)
        if self._is_first:
            given = (self._config_as_given, self.path, self.run_id, step)
            trackers = (plugin.start_tracker(*given) for plugin in self.config.plugins)
            self._tracker = last_given(trackers, None)

    def continue_records(self) -> None:
        """Write run.json, continue the run at a tracker, truncate the records, then write the buffered lines.

        A resume does it last, because the truncated lines are lost. Warns of each file that is shorter than the
        checkpoint states.
        """
        self._write_header_and_start_tracker()
        for file in self._files.values():
            file.truncate()

    def record_bytes(self) -> dict[str, int]:
        """Return the length of each record file so far, by its name in the run."""
        return {name: file.size() for name, file in self._files.items()}

    def flush(self) -> None:
        """Flush all lines so far to the disk."""
        for file in self._files.values():
            file.flush()

    def last_metrics(self) -> dict[str, float]:
        """Return the newest line of metrics; empty before the first step."""
        lines = (self.path / "metrics.jsonl").read_bytes().splitlines()
        return json.loads(lines[-1]) if lines else {}

    def log_metrics(self, metrics: dict[str, float]) -> None:
        """Append one step's metrics."""
        self._files["metrics"].append(metrics)
        if self._tracker is not None:
            self._tracker.log(metrics, step=int(metrics["step"]))

    def record_event(self, event: str, **fields) -> None:
        """Append an event, stamped with the time."""
        self._files[self._events].append({"event": event, "time": time.time(), **fields})

    def log_sample(self, **fields) -> None:
        """Append a readable trajectory."""
        self._files["samples"].append(fields)

    def close(self, error: BaseException | None = None) -> None:
        """Record the end of the run, with the error that caused it. Then close all files and the tracker.

        A resume that ends before `continue_records` leaves the records unchanged.
        """
        reason = "" if error is None else f"{type(error).__name__}: {error}".partition("\n")[0]
        self.record_event(
            "run_ended", status="finished" if error is None else "ended early", reason=reason
        )
        for file in self._files.values():
            file.close()
        if self._tracker is not None:
            self._tracker.finish()


def check_is_free(folder: Path) -> None:
    """Raise ValueError if the directory of a new run is taken."""
    if folder.exists() and not _ended_before_first_step(folder):
        raise ValueError(
            f"run directory {folder} exists; give another --run-name, move it away, or continue it: --resume"
        )


def _ended_before_first_step(folder: Path) -> bool:
    """Return whether the run of a directory, or its node, made no step and its process is gone."""
    events = folder / "events.jsonl"
    if not events.exists() or b'"event":"step"' in events.read_bytes().replace(b" ", b""):
        return False
    if any(folder.glob("failed_step_*")):  # kept for the user
        return False
    file = RecordFile(events)
    is_free = file.lock()
    file.close()
    return is_free


def _make_name(config: Config) -> str:
    what = f"{run_name_part(config.task)}-{run_name_part(config.algo)}"
    return f"{what}-a{config.async_ratio:g}-s{config.seed}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
