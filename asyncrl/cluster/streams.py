"""Standard output and error that never end a program. Text that cannot be written is lost."""

import contextlib
import io
import os
import select
import sys


class LastingFile(io.FileIO):
    """A standard stream that ignores some errors when it writes."""

    def __init__(self, descriptor: int, ignored: type[OSError]):
        super().__init__(descriptor, "w", closefd=False)
        self._ignored = ignored

    def write(self, text) -> int:
        """Write bytes, or lose them by an ignored error. Return the number of written or lost bytes.

        Raises the first other OSError. Later text is lost.
        """
        written = None
        try:
            while written is None:  # another program may have made the terminal non-blocking
                select.select([], [self], [])
                written = super().write(text)
        except OSError as error:
            ignored, self._ignored = self._ignored, OSError
            if not isinstance(error, ignored):
                raise
            return memoryview(text).nbytes
        return written


def keep_printing(ignored: type[OSError] = OSError) -> None:
    """Make standard output and error of this process survive the end of a terminal or pipe, or a full disk.

    Standard output loses text by an `ignored` error, and standard error by any error. A character that the encoding
    lacks is escaped. A closed stream goes to /dev/null. A stream that is not Python's own stays unchanged.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            # The next file would get this number, and C code would print into it. So /dev/null gets it now.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    sys.stdout = _lasting(sys.stdout, sys.__stdout__, 1, ignored)
    sys.stderr = _lasting(sys.stderr, sys.__stderr__, 2, OSError)


def _lasting(
    stream: io.TextIOBase | None,
    original: io.TextIOBase | None,
    descriptor: int,
    ignored: type[OSError],
) -> io.TextIOBase:
    """Return a lasting stream in place of Python's own, and any other stream unchanged."""
    if stream is not original:
        return stream
    if stream is not None:
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    file = io.BufferedWriter(LastingFile(descriptor, ignored))
    encoding = stream.encoding if stream is not None else "utf-8"
    return io.TextIOWrapper(file, encoding, errors="backslashreplace", line_buffering=True)
