"""A new folder that all ranks write: whole, on the disk, or not there."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist

from asyncrl.cluster.cluster import gather_from_ranks
from asyncrl.runlog.disk_files import flush, remove


@contextlib.contextmanager
def fail_together(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Run a block on all ranks of a group; collective. If it fails on one rank, raise OSError on all."""
    failure = ""
    try:
        yield
    except Exception as error:
        failure = f"rank {dist.get_rank()}: {describe_error(error)}"
    failures = list(filter(None, gather_from_ranks(failure, group)))
    if failures:
        raise OSError(failures[0])


def describe_error(error: Exception) -> str:
    """Return an error's type and message in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


@contextlib.contextmanager
def new_folder(path: Path | str, group: dist.ProcessGroup | None = None) -> Iterator[Path]:
    """Give the ranks of a group a new folder to write to; collective. Only rank 0 needs its path.

    The folder is `path`.tmp until the end of the block. Then it is flushed to the disk and gets its name. If a rank
    fails, all raise OSError, in one line, and no file is left.
    """
    folder = Path(f"{path}.tmp")
    is_first = dist.get_rank() == 0
    try:
        with fail_together(group):
            if is_first:
                if Path(path).exists():
                    raise FileExistsError(f"{path} exists already")
                remove(folder)  # left by a run that was killed here
                folder.mkdir(parents=True)
        yield folder
        with fail_together(group):
            if is_first:
                for written in [folder, *folder.rglob("*")]:
                    flush(written)
                folder.rename(path)
                flush(folder.parent)
    except (OSError, RuntimeError) as error:
        what = str(path) or "the folder of rank 0"
        raise OSError(f"{what} was not written: {error}") from error
    finally:
        if is_first:
            shutil.rmtree(folder, ignore_errors=True)
