"""User code: a loss, a task, a reward, an environment or an optimizer in a file of the user's, as FILE.py:NAME.

A command line is checked with the files where they are. Then the run copies them to runs/NAME/code, with the files
beside them that they import. Trainer ranks, rollout workers and resumes load those copies, whatever happens to the
files. Of several nodes, each leader copies the files at the same paths to its node's folder of the run. Before that,
the fingerprints of nodes compare them.

Only the text FILE.py:NAME travels between processes. Each process imports the file as a module of the file's name. Of
the files beside it, those that it imports are found, and no others: they would hide modules of Python or of libraries.
So the name of an installed module is refused.
"""

import ast
import contextlib
import functools
import importlib
import os
import re
import shutil
import site
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from asyncrl import OUR_MODULES, PLACES
from asyncrl.config import USER_CODE, Config, nearest

_MAX_REASON = 300  # characters


def is_user_code(text: str) -> bool:
    """Whether a text is FILE.py:NAME, also with `environment:` before it, or a weight behind."""
    return re.match(USER_CODE, text) is not None


def file_of(text: str) -> Path:
    """The file of a FILE.py:NAME, absolute."""
    return Path(os.path.abspath(re.match(USER_CODE, text)["file"]))


def run_name_part(text: str) -> str:
    """A task or loss as a word, for the name of a run: FILE-NAME of user code."""
    match = re.match(USER_CODE, text)
    return (
        f"{Path(match['file']).stem}-{match['name']}" if match else re.sub(r"[^\w.+=-]+", "-", text)
    )


def as_typed(text: str) -> str:
    """A task as it is given on the command line."""
    return text.removeprefix("environment:")


def user_code_names(config: Config) -> list[str]:
    """Each FILE.py:NAME of a run."""
    return list(
        filter(
            is_user_code,
            (config.algo, config.advantage, config.task, config.optimizer, *config.reward),
        )
    )


def with_absolute_paths(config: Config, folder: Path | None = None) -> Config:
    """Return the options with absolute paths of user code, which is in that folder, or else where the options say.

    Paths of rows become absolute, too, so that a run resumed in another folder has the same.
    """

    def locate(match: re.Match) -> str:
        file = Path(match["file"])
        path = os.path.abspath(file if folder is None else folder / _place(file))
        return f"{match['kind'] or ''}{path}:{match['name']}{match['weight'] or ''}"

    options = {
        name: re.sub(USER_CODE, locate, getattr(config, name))
        for name in ("algo", "advantage", "task", "optimizer")
    }
    rewards = tuple(re.sub(USER_CODE, locate, reward) for reward in config.reward)
    if config.data_path:
        options["data_path"] = os.path.abspath(config.data_path)
    if config.task == "jsonl":
        options["task_args"] = tuple(
            f"test={os.path.abspath(text[5:])}" if text.startswith("test=") else text
            for text in config.task_args
        )
    return replace(config, **options, reward=rewards)


def with_copied_files(config: Config, folder: Path) -> Config:
    """Copy the files of user code into a folder, which is made if there are any. Return the options with the copies."""
    for place, path in files(user_code_names(config)).items():
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, folder / place)
    return with_absolute_paths(config, folder)


def _place(file: Path) -> str:
    """Return the name of a file's copy: its module's, which has no dots."""
    return file.stem.replace(".", "_") + file.suffix


def files(texts: Iterable[str]) -> dict[str, Path]:
    """Files of user code by their place in their folder: those that are named, and what they import from there.

    Raises ValueError for two files of one place, and OSError for a file that is missing.
    """
    paths: dict[str, Path] = {}
    waiting = [(file_of(text).parent, file_of(text)) for text in texts]
    for folder, path in waiting:
        place = path.relative_to(folder).with_name(_place(path)).as_posix()
        if paths.setdefault(place, path) != path:
            raise ValueError(
                f"{path} and {paths[place]} would be one module; rename one of the two"
            )
        waiting += [
            (folder, file) for file in _imported(path, folder) if file not in paths.values()
        ]
    return paths


def _imported(path: Path, folder: Path) -> Iterator[Path]:
    """Files of a folder that a file imports, also inside functions."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # whoever loads it says so
        return
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add(node.module)
    for name in sorted({name.partition(".")[0] for name in names} - set(OUR_MODULES)):
        file = folder / f"{name}.py"
        yield from [file] if file.is_file() else sorted((folder / name).rglob("*.py"))


def load(text: str, option: str = "--task", shipped: Mapping[str, Any] | None = None) -> Any:
    """The object of that name: one of those `shipped` with this code, or FILE.py:NAME of user code.

    Raises ValueError, in one line, for a file that is missing, has the name of another module, raises when it is
    imported (with the line), or lacks the name.
    """
    if shipped and text in shipped:
        return shipped[text]
    if not is_user_code(text):
        known = ", ".join(shipped or {})
        raise ValueError(
            f"{option} {text!r} is none of {known}, nor FILE.py:NAME{nearest(text, shipped or {})}"
        )
    module = _module(text, option)
    name = re.match(USER_CODE, text)["name"]
    if hasattr(module, name):
        return getattr(module, name)
    defined = [
        word
        for word, value in vars(module).items()
        if getattr(value, "__module__", "") == module.__name__
    ]
    raise ValueError(
        f"{option} {module.__file__} has no {name}; it has {', '.join(defined) or 'none'}{nearest(name, defined)}"
    )


@functools.cache
def _module(text: str, option: str) -> ModuleType:
    """The module of a file, imported once. A copy in another folder replaces it, with what it imports."""
    file = file_of(text)
    folder = str(file.parent)
    if not file.is_file():
        raise ValueError(f"{option} {as_typed(text)}: there is no file {file}; give FILE.py:NAME")
    places = {  # of a package, the folder that it is in
        place.partition("/")[0].removesuffix(".py"): folder if "/" in place else str(path)
        for place, path in files([text]).items()
    }
    taken = {*OUR_MODULES, *sys.stdlib_module_names, "__main__"}
    for name in places:
        if name in taken or PathFinder.find_spec(name, site.getsitepackages()):
            raise ValueError(
                f"{option} {folder}/{name}.py has the name of another module; rename it"
            )
    # A program may have imported its own file before: what it has made of it must not be another module's.
    loaded = {name: getattr(sys.modules.get(name), "__file__", None) for name in places}
    moved = {name for name, place in places.items() if PLACES.get(name, loaded[name]) != place}
    for module in [module for module in sys.modules if module.partition(".")[0] in moved]:
        del sys.modules[module]
    PLACES.update(places)
    importlib.invalidate_caches()
    with errors_as_value_error(text, option):
        return importlib.import_module(Path(_place(file)).stem)


@contextlib.contextmanager
def errors_as_value_error(text: str, option: str = "--task") -> Iterator[None]:
    """Turn what user code raises here into a ValueError of one line, with its file and line; shipped code has none."""
    try:
        yield
    except (Exception, SystemExit) as error:  # foreign code may raise anything
        reason = _described(error, file_of(text)) if is_user_code(text) else error
        raise ValueError(f"{option} {as_typed(text)}: {reason}") from error


def _described(error: BaseException, file: Path) -> str:
    """Return where in the folder of a file an error comes from, and what it says, on one line."""
    frames = traceback.extract_tb(error.__traceback__)
    places = [(frame.filename, frame.lineno) for frame in frames]
    if isinstance(error, SyntaxError) and error.filename:  # a file with a NUL byte has none
        places.append((error.filename, error.lineno))
    where = file.name
    for name, line in places:
        if Path(name).is_relative_to(file.parent) and "site-packages" not in name:
            where = f"{Path(name).name}, line {line}"
    reason = " ".join(f"{type(error).__name__}: {error}".removesuffix(": ").split())
    return f"{where}: {reason[:_MAX_REASON]}"
