"""The program that calls train(). Processes of a run must be able to import it, and it ends in one line."""

import contextlib
import multiprocessing
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from asyncrl.cluster.processes import EXPECTED, print_end

_UNGUARDED = (
    "this program calls train() whenever it is imported, as each process of a run does; put the call under "
    '`if __name__ == "__main__":`'
)


@contextlib.contextmanager
def checked_caller() -> Iterator[None]:
    """Refuse a caller that cannot start a run. An expected error that is not caught ends a program in one line."""
    try:
        _check_caller()
        yield
    except EXPECTED as error:
        _end_in_one_line(error)
        raise


def _end_in_one_line(error: BaseException) -> None:
    show, show_in_thread = sys.excepthook, threading.excepthook

    def end(kind, value, trace) -> None:
        print_end(value) if value is error else show(kind, value, trace)

    def end_thread(ended) -> None:
        print_end(error) if ended.exc_value is error else show_in_thread(ended)

    sys.excepthook, threading.excepthook = end, end_thread


def _check_caller() -> None:
    """Raise ValueError, in one line, unless processes can import the program, and signals can be handled."""
    thread = threading.current_thread()
    if thread is not threading.main_thread():
        raise ValueError(
            f"train() was called in thread {thread.name}, where no signal can be handled; call it in the main thread"
        )
    process = multiprocessing.current_process()
    if getattr(process, "_inheriting", False):  # a process of a run is importing the program
        raise ValueError(_UNGUARDED)
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    name = getattr(getattr(main, "__spec__", None), "name", "")
    if file is None or name.endswith("__main__"):  # no process imports a notebook or a package
        return
    if not os.path.isfile(file):
        raise ValueError(
            f"train() was called by the program {file}, which no other process can import; save it as a file"
        )
    if "_main__" not in Path(file).read_text(errors="replace"):
        raise ValueError(_UNGUARDED)
