"""User code: a loss, a task, a reward, an environment or an optimizer in a file of the user's, as FILE.py:NAME.

A command line is checked with the files where they are. Then the run copies them to runs/NAME/code, with the files
beside them that they import. Trainer ranks, rollout workers and resumes load those copies, whatever happens to the
files. Of several nodes, each leader copies the files at the same paths to its node's folder of the run. Before that,
the fingerprints of nodes compare them (asyncrl/runlog/fingerprint.py).

Only the text FILE.py:NAME travels between processes. Each process imports the file as a module of the file's name, with
its folder on the import path. So the name of an installed module, or of this code, is refused.
"""

import contextlib
import functools
import importlib
import multiprocessing
import os
import re
import shutil
import site
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from importlib.machinery import PathFinder
from multiprocessing.pool import ThreadPool
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from asyncrl.config import OWN, Config, flag, nearest

OUR_MODULES = {"algos", "asyncrl", "data", "extras", "rollout", "train_async"}
_MAX_REASON = 300  # characters
_FOLDERS: dict[str, str] = {}
"""The folder from which this process imports a module of the user, by the module's name."""
Options = TypeVar("Options", bound=Config)


def is_own(text: str) -> bool:
    """Whether a text is FILE.py:NAME, also with `environment:` before it, or a weight behind."""
    return re.fullmatch(OWN, text) is not None


def file_of(text: str) -> Path:
    """The file of a FILE.py:NAME, absolute."""
    return Path(os.path.abspath(re.fullmatch(OWN, text)["file"]))


def title(text: str) -> str:
    """A task or loss as a word, for the name of a run: FILE-NAME of user code."""
    match = re.fullmatch(OWN, text)
    return f"{Path(match['file']).stem}-{match['name']}" if match else text.replace(":", "-")


def typed(text: str) -> str:
    """A task as it is given on the command line."""
    return text.removeprefix("environment:")


def texts_of(config: Config) -> list[str]:
    """Each FILE.py:NAME of a run."""
    return [
        text
        for text in (config.algo, config.task, config.optimizer, *config.reward)
        if is_own(text)
    ]


def located(config: Options, folder: Path | None = None) -> Options:
    """Return the options with absolute paths of user code, which is in that folder, or else where the options say."""

    def locate(text: str) -> str:
        if not is_own(text):
            return text
        start, end = re.fullmatch(OWN, text).span("file")
        file = file_of(text)
        return f"{text[:start]}{os.path.abspath((folder or file.parent) / file.name)}{text[end:]}"

    named = {option: locate(getattr(config, option)) for option in ("algo", "task", "optimizer")}
    return replace(config, **named, reward=tuple(map(locate, config.reward)))


def copied(config: Options, folder: Path) -> Options:
    """Copy the files of user code into a folder, which is made if there are any. Return the options with the copies."""
    for place, path in files(texts_of(config)).items():
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, folder / place)
    return located(config, folder)


def files(texts: Iterable[str]) -> dict[str, Path]:
    """Files of user code by their place in their folder: those that are named, and what they import from there.

    Raises ValueError for two files of one place, and OSError for a file that is missing.
    """
    found: dict[str, Path] = {}
    waiting = [(file_of(text).parent, file_of(text)) for text in texts]
    for folder, path in waiting:
        place = path.relative_to(folder).as_posix()
        if found.setdefault(place, path) != path:
            raise ValueError(
                f"{path} and {found[place]} would be one module; rename one of the two"
            )
        waiting += [
            (folder, file) for file in _imported(path, folder) if file not in found.values()
        ]
    return found


def _imported(path: Path, folder: Path) -> Iterator[Path]:
    """Files of a folder that a file may import: those that its lines of imports name."""
    source = path.read_text(encoding="utf-8", errors="replace")
    imports = " ".join(re.findall(r"^\s*(?:import|from)\s(.*)", source, re.MULTILINE))
    for name in set(re.findall(r"\w+", imports)) - OUR_MODULES:
        file = folder / f"{name}.py"
        yield from [file] if file.is_file() else sorted((folder / name).rglob("*.py"))


def load(text: str, option: str = "--task", shipped: Mapping[str, Any] | None = None) -> Any:
    """The object of that name: one of those `shipped` with this code, or FILE.py:NAME of user code.

    Raises ValueError, in one line, for a file that is missing, has the name of another module, raises when it is
    imported (with the line), or lacks the name.
    """
    if shipped and text in shipped:
        return shipped[text]
    if not is_own(text):
        known = ", ".join(shipped or {})
        raise ValueError(
            f"{option} {text!r} is none of {known}, nor FILE.py:NAME{nearest(text, shipped or {})}"
        )
    file, name = file_of(text), re.fullmatch(OWN, text)["name"]
    module = _module(text, option)
    if hasattr(module, name):
        return getattr(module, name)
    defined = [
        word
        for word, value in vars(module).items()
        if getattr(value, "__module__", "") == file.stem
    ]
    raise ValueError(
        f"{option} {file} has no {name}; it has {', '.join(defined) or 'none'}{nearest(name, defined)}"
    )


@functools.cache
def _module(text: str, option: str) -> ModuleType:
    """The module of a file, imported once. A copy in another folder replaces it, with what it imports."""
    file = file_of(text)
    folder = str(file.parent)
    if not file.is_file():
        raise ValueError(f"{option} {typed(text)}: there is no file {file}; give FILE.py:NAME")
    names = {Path(place).parts[0].removesuffix(".py") for place in files([text])}
    for name in names:
        if name in OUR_MODULES | sys.stdlib_module_names or PathFinder.find_spec(
            name, site.getsitepackages()
        ):
            raise ValueError(
                f"{option} {folder}/{name}.py has the name of another module; rename it"
            )
    moved = {name for name in names if _FOLDERS.get(name, folder) != folder}
    for name in [name for name in sys.modules if name.partition(".")[0] in moved]:
        del sys.modules[name]
    _FOLDERS.update(dict.fromkeys(names, folder))
    sys.path.insert(0, folder)
    importlib.invalidate_caches()
    with blamed(text, option):
        return importlib.import_module(file.stem)


@contextlib.contextmanager
def blamed(text: str, option: str = "--task") -> Iterator[None]:
    """Turn what user code raises here into a ValueError of one line, with its file and line."""
    try:
        yield
    except (Exception, SystemExit) as error:  # foreign code may raise anything
        raise ValueError(f"{option} {typed(text)}: {where(error, text)}") from error


def where(error: BaseException, text: str) -> str:
    """Where in user code an error comes from, and what it says, on one line; just that for shipped code."""
    if not is_own(text):
        return str(error)
    folder, place = file_of(text).parent, file_of(text).name
    frames = traceback.extract_tb(error.__traceback__)
    inside = [
        f
        for f in frames
        if Path(f.filename).is_relative_to(folder) and "site-packages" not in f.filename
    ]
    if isinstance(error, SyntaxError) and error.filename:
        place = f"{Path(error.filename).name}, line {error.lineno}"
    elif inside:
        place = f"{Path(inside[-1].filename).name}, line {inside[-1].lineno}"
    reason = " ".join(str(error).split())[:_MAX_REASON]
    return f"{place}: {type(error).__name__}{': ' if reason else ''}{reason}"


@functools.cache
def _thread() -> ThreadPool:
    """A daemon thread. One that hangs keeps no process from ending."""
    return ThreadPool(1)


def call_within(config: Config, option: str, function: Callable[[], Any], *, what: str) -> Any:
    """Return what a function of the user's task returns within the seconds of an option.

    Raises what the function raises, and after that time ValueError, in one line that says `what` is not there.
    """
    limit_s = getattr(config, option)
    try:
        return _thread().apply_async(function).get(limit_s)
    except multiprocessing.TimeoutError:
        raise ValueError(
            f"--task {typed(config.task)}: {what} is not there after {limit_s:g} s; fix it, or raise --{flag(option)} "
            "if it is only slow"
        ) from None
