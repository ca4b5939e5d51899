"""User code: a loss, a task, a reward, an environment or an optimizer in a user's file, FILE.py:NAME.

A command line is checked with the files in their place. Then the run copies them to runs/NAME/code, with the files
beside them that they import. Trainer ranks, rollout workers and resumes load the copies, so later changes of the files
have no effect. On several nodes each leader copies the files from the same paths to its node's folder of the run. The
fingerprints of nodes compare the files before.

Only the text FILE.py:NAME travels between processes. Each process imports the file as a module of the file's name. It
finds only imported files beside it, because other files could hide modules of Python or of libraries. So the name of
an installed module is refused.
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
from dataclasses import dataclass, replace
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from asyncrl import OUR_MODULES, PLACES
from asyncrl.config import MADE_HERE, USER_CODE, Config, nearest

MAX_REASON = 300
"""Characters that an error quotes of foreign code's."""


@dataclass(frozen=True)
class UserCode:
    """A name in a file: FILE.py:NAME of an option."""

    kind: str
    """`environment:` or `agent:` of a task, or empty."""
    file: Path
    """Absolute."""
    name: str
    weight: str
    """`*WEIGHT` of a reward, or empty."""

    def __str__(self) -> str:
        return f"{self.kind}{self.file}:{self.name}{self.weight}"


def parse_user_code(text: str) -> UserCode | None:
    """Return the user code that an option names; None for the name of shipped code."""
    match = re.match(USER_CODE, text)
    if match is None:
        return None
    kind, file, name, weight = match.groups(default="")
    return UserCode(kind, Path(os.path.abspath(file)), name, weight)


def is_user_code(text: str) -> bool:
    """Return whether an option names user code."""
    return parse_user_code(text) is not None


def run_name_part(text: str) -> str:
    """Return a task or a loss as a word, for the name of a run: FILE-NAME of user code."""
    code = parse_user_code(text)
    return re.sub(r"[^\w.+=-]+", "-", f"{code.file.stem}-{code.name}" if code else text)


def user_code_names(config: Config) -> list[str]:
    """Return each FILE.py:NAME of a run."""
    names = (config.algo, config.advantage, config.task, config.optimizer, *config.reward)
    return list(filter(is_user_code, names))


def with_absolute_paths(config: Config, folder: Path | None = None) -> Config:
    """Return the options with absolute paths of user code, in `folder` if it is given.

    Paths of rows and of a model become absolute, too. So a run that is resumed from another folder reads the same.
    """

    def locate(text: str) -> str:
        code = parse_user_code(text)
        if code and folder:
            code = replace(code, file=Path(os.path.abspath(folder / _copy_name(code.file))))
        return str(code or text)

    options = {
        name: locate(getattr(config, name)) for name in ("algo", "advantage", "task", "optimizer")
    }
    rewards = tuple(map(locate, config.reward))
    if config.model not in MADE_HERE and os.path.isdir(config.model):
        options["model"] = os.path.abspath(config.model)
    if config.data_path:
        options["data_path"] = os.path.abspath(config.data_path)
    if config.task == "jsonl":
        options["task_args"] = tuple(
            f"test={os.path.abspath(text[5:])}" if text.startswith("test=") else text
            for text in config.task_args
        )
    return replace(config, **options, reward=rewards)


def with_copied_files(config: Config, folder: Path) -> Config:
    """Copy the files of user code into a folder, and return the options with the copies.

    The folder is made if there are files.
    """
    for place, path in files(user_code_names(config)).items():
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, folder / place)
    return with_absolute_paths(config, folder)


def _copy_name(file: Path) -> str:
    """Return the name of a file's copy: the module's name, without dots."""
    return file.stem.replace(".", "_") + file.suffix


def files(texts: Iterable[str]) -> dict[str, Path]:
    """Return files of user code by their place in their folder: named files, and files there that they import.

    Raises ValueError for two files of one place, and OSError for a file that is missing.
    """
    paths: dict[str, Path] = {}
    named = [parse_user_code(text).file for text in texts]
    waiting = [(path.parent, path) for path in named]
    for folder, path in waiting:
        place = path.relative_to(folder).with_name(_copy_name(path)).as_posix()
        if paths.setdefault(place, path) != path:
            raise ValueError(
                f"{path} and {paths[place]} would be one module; rename one of the two"
            )
        waiting += [
            (folder, file) for file in _imported_files(path, folder) if file not in paths.values()
        ]
    return paths


def _imported_files(path: Path, folder: Path) -> Iterator[Path]:
    """Yield the files of a folder that a file imports, also inside functions."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # loading the file reports the mistake
        return
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add(node.module)
    for name in sorted({name.partition(".")[0] for name in names} - set(OUR_MODULES)):
        file, package = folder / f"{name}.py", folder / name
        if file.is_file():
            yield file
        elif (package / "__init__.py").is_file() or not _is_installed(name):
            yield from sorted(package.rglob("*.py"))


def _is_installed(module: str) -> bool:
    return PathFinder.find_spec(module, site.getsitepackages()) is not None


def load(text: str, option: str = "--task", shipped: Mapping[str, Any] = {}) -> Any:
    """Return the object of that name: `shipped` with this code, or FILE.py:NAME of user code.

    Raises ValueError, in one line, if the file is missing, lacks the name, or is called like another module. An error
    while the file is imported becomes a ValueError with its line.
    """
    if text in shipped:
        return shipped[text]
    code = parse_user_code(text)
    if code is None and text.endswith(".py"):
        raise ValueError(f"{option} {text} names a file only; give FILE.py:NAME, as {text}:NAME")
    if code is None:
        raise ValueError(
            f"{option} {text!r} is none of {', '.join(shipped)}, nor FILE.py:NAME{nearest(text, shipped)}"
        )
    module = _module(text, option)
    if hasattr(module, code.name):
        return getattr(module, code.name)
    defined = [
        word
        for word, value in vars(module).items()
        if getattr(value, "__module__", "") == module.__name__
    ]
    raise ValueError(
        f"{option} {module.__file__} has no {code.name}; it has {', '.join(defined) or 'none'}"
        f"{nearest(code.name, defined)}"
    )


@functools.cache
def _module(text: str, option: str) -> ModuleType:
    """Return the module of a file, imported once. A copy in another folder replaces the module and its imports."""
    file = parse_user_code(text).file
    folder = str(file.parent)
    if not file.is_file():
        raise ValueError(f"{option} {text}: there is no file {file}; give FILE.py:NAME")
    places = {  # of a package, the folder that it is in
        place.partition("/")[0].removesuffix(".py"): folder if "/" in place else str(path)
        for place, path in files([text]).items()
    }
    taken = {*OUR_MODULES, *sys.stdlib_module_names, "__main__"}
    for name in places:
        if name in taken or _is_installed(name):
            path = file.with_name(name)
            suffix = "" if path.is_dir() else ".py"
            raise ValueError(f"{option} {path}{suffix} has the name of another module; rename it")
    # A program can have imported its own file before. Objects of that module must not belong to another module.
    loaded = {name: getattr(sys.modules.get(name), "__file__", None) for name in places}
    moved = {name for name, place in places.items() if PLACES.get(name, loaded[name]) != place}
    for module in [module for module in sys.modules if module.partition(".")[0] in moved]:
        del sys.modules[module]
    PLACES.update(places)
    importlib.invalidate_caches()
    with errors_as_value_error(text, option):
        return importlib.import_module(Path(_copy_name(file)).stem)


@contextlib.contextmanager
def errors_as_value_error(text: str, option: str = "--task") -> Iterator[None]:
    """Turn any error here into a ValueError of one line. For user code it has file and line."""
    try:
        yield
    except (Exception, SystemExit) as error:  # foreign code may raise anything
        code = parse_user_code(text)
        reason = _describe_error(error, code.file) if code else error
        raise ValueError(f"{option} {text}: {reason}") from error


def _describe_error(error: BaseException, file: Path) -> str:
    """Return the file and line of an error, in the folder of a file, and its text, on one line."""
    places = traceback.extract_tb(error.__traceback__)
    if isinstance(error, SyntaxError) and error.filename:  # missing for a file with a NUL byte
        places.append(error)  # it has filename and lineno, as a frame
    where = file.name
    for place in places:
        path = Path(place.filename)
        if path.is_relative_to(file.parent) and "site-packages" not in path.parts:
            where = f"{path.name}, line {place.lineno}"
    return f"{where}: {one_line(error)}"


def one_line(error: BaseException) -> str:
    """Return the type and the text of an error on one line, even if its `__str__` raises."""
    try:
        text = str(error)
    except Exception:
        text = "an error without a text"
    return " ".join(f"{type(error).__name__}: {text}".removesuffix(": ").split())[:MAX_REASON]
