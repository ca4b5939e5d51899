"""Rollout workers as processes: what one that is started again has of the user's own files."""

import time
from pathlib import Path

from own_files import LOSS, write_own

from asyncrl import user_code as own
from asyncrl.cluster.placement import Placement, WorkerPlacement
from asyncrl.config import Config
from asyncrl.controller.workers import Workers


def say_where_the_loss_is(spec, connection):
    with open(spec.log_path, "a") as log:
        log.write(f"{spec.config.algo}\n")
    connection.recv()


def wait_for_lines(path, count):
    deadline = time.monotonic() + 30
    while len(lines := path.read_text().splitlines() if path.exists() else []) < count:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return lines


def test_a_worker_that_is_started_again_has_the_users_files_as_they_were(tmp_path):
    path, log = write_own(tmp_path / "mine", LOSS), tmp_path / "run" / "worker_0.log"
    config = Config(algo=f"{path}:loss")
    own.copy([config.algo], tmp_path / "run" / "code")
    placement = Placement((None,), 1, (WorkerPlacement(0, None, None, 1, 0.0),), "shm")
    workers = Workers(config, placement, "model", tmp_path / "run", say_where_the_loss_is)
    workers.have_worked = True
    try:
        workers.launch(lambda worker, message: None, lambda future: None)
        wait_for_lines(log, 1)
        for change in ("", "# edited while the run goes on\n"):
            path.write_text(path.read_text() + change)
            (worker,) = workers
            worker.process.process.kill()
            workers.replace(worker)
            wait_for_lines(log, 2 if change == "" else 3)
    finally:
        workers.stop()
    first, again, edited = (Path(line.rpartition(":")[0]) for line in wait_for_lines(log, 3))
    assert first == again == path and edited == tmp_path / "run" / "code" / path.name
    assert edited.read_text() == LOSS
