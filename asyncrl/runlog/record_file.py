"""A file of JSON lines that outlives a kill, and that a resumed run can truncate."""

import fcntl
import os
import threading
from pathlib import Path

import msgspec

from asyncrl.runlog.plain import encode


class RecordFile:
    """Appends records as lines. The operating system has a line when `append` returns. Threads can share it."""

    def __init__(self, path: Path, resume_at: int | None = None):
        """Open or make the file. A resumed run continues at byte `resume_at`, and keeps records until `truncate`.

        Raises ValueError if that byte is within a line.
        """
        self.path = path
        self._file = open(path, "ab")  # noqa: SIM115
        self._lock = threading.RLock()
        self._resume_at = resume_at
        self._buffered: list[bytes] | None = None if resume_at is None else []
        if resume_at:
            with open(path, "rb") as lines:
                lines.seek(resume_at - 1)
                is_end = lines.read(1) in (b"\n", b"")
            if not is_end:
                raise ValueError(
                    f"{path} cannot be truncated to the checkpoint: byte {resume_at} is not the end of a line. The "
                    "file was changed since. Restore it, or move it away to continue without it. Nothing was changed"
                )

    def append(self, record: dict) -> None:
        """Write a record, or buffer it until `truncate`. After `close` it is ignored.

        Raises OSError, with the path, if it cannot be written.
        """
        line = encode(record, msgspec.json.encode) + b"\n"  # null for NaN and infinities
        with self._lock:
            if self._buffered is None:
                self._write(line)
            else:
                self._buffered.append(line)

    def _write(self, line: bytes) -> None:
        if self._file.closed:
            return  # The last message of a worker can come after the end.
        if not os.fstat(self._file.fileno()).st_nlink:
            raise OSError(
                f"{self.path} was deleted under the run that writes it; leave a run's directory alone"
            )
        try:
            self._file.write(line)
            self._file.flush()
        except OSError as error:
            error.filename = str(self.path)
            raise

    def lock(self) -> bool:
        """Lock the file until it is closed. Returns whether no other process has the lock."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    def truncate(self) -> None:
        """Keep the file up to the byte that the run continues from, then write the buffered records.

        If the file is shorter, its whole lines stay, and a warning is printed.
        """
        with self._lock:
            size, num_bytes = self.size(), self._resume_at
            if size < num_bytes:
                lost = f"has {size} of the {num_bytes} bytes that the checkpoint counts; the missing lines are lost"
                print(f"warning: {self.path} {lost}", flush=True)
                num_bytes = self.path.read_bytes().rfind(b"\n") + 1
            os.truncate(self.path, num_bytes)
            for line in self._buffered:
                self._write(line)
            self._buffered = None

    def size(self) -> int:
        """Return the bytes of the file so far. All lines are whole, because the lock is held."""
        with self._lock:
            return os.fstat(self._file.fileno()).st_size

    def flush(self) -> None:
        """Flush all records so far to the disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file. Buffered records are lost."""
        with self._lock:
            self._file.close()
