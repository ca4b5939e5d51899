"""Standard output and error that end no program: text that cannot be written is lost, and the program continues."""

import contextlib
import io
import os
import select
import sys


class LastingFile(io.FileIO):
    """A standard stream whose writing never fails by some errors."""

    def __init__(self, descriptor: int, ignored: type[OSError]):
        super().__init__(descriptor, "w", closefd=False)
        self._ignored = ignored

    def write(self, text) -> int:
        """Write bytes, or lose them by an error that is ignored. Return how many are done with.

        Raises the first other OSError. What comes after it is lost.
        """
        written = None
        try:
            while written is None:  # another program may have set the terminal not to block
                select.select([], [self], [])
                written = super().write(text)
        except OSError as error:
            ignored, self._ignored = self._ignored, OSError
            if not isinstance(error, ignored):
                raise
            return memoryview(text).nbytes
        return written


def keep_printing(ignored: type[OSError] = OSError) -> None:
    """Make standard output and error of this process last, whatever happens to a terminal, a pipe or a disk.

    Standard output loses what an `ignored` error keeps from being written, and standard error loses it by any. A
    character that the encoding lacks is escaped. A stream that was closed goes to /dev/null. A stream that is not
    Python's own stays as it is.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            # The next file would get the number, and C code would print into it. All below are taken: it gets this one.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    sys.stdout = _lasting(sys.stdout, sys.__stdout__, 1, ignored)
    sys.stderr = _lasting(sys.stderr, sys.__stderr__, 2, OSError)


def _lasting(
    stream: io.TextIOBase | None,
    original: io.TextIOBase | None,
    descriptor: int,
    ignored: type[OSError],
) -> io.TextIOBase:
    """Return a lasting stream in place of Python's own; another stream as it is."""
    if stream is not original:
        return stream
    if stream is not None:
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    file = io.BufferedWriter(LastingFile(descriptor, ignored))
    encoding = stream.encoding if stream is not None else "utf-8"
    return io.TextIOWrapper(file, encoding, errors="backslashreplace", line_buffering=True)
