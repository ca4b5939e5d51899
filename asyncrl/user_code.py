"""What users bring in files of their own, as FILE.py:NAME: a loss, a task, a reward, an environment, an optimizer.

Only this text travels. Every process loads the file by itself, as a module of the file's name whose folder is on the
import path; so a name means one module everywhere, and what another module has already is refused.
"""

import ast
import contextlib
import hashlib
import importlib.util
import os
import queue
import re
import shutil
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from types import ModuleType
from typing import Any

from asyncrl.config import OWN, Config, flag, nearest

ROOT = Path(__file__).resolve().parent.parent
_MAX_REASON = 300  # characters


def is_own(text: str) -> bool:
    """Whether a text is FILE.py:NAME, also with `environment:` before it, or a weight behind."""
    return re.fullmatch(OWN, text) is not None


def file_of(text: str) -> Path:
    """The file of a FILE.py:NAME."""
    return Path(re.fullmatch(OWN, text)["file"])


def title(text: str) -> str:
    """A task or loss as a word, for the name of a run: FILE-NAME of a user's own."""
    found = re.fullmatch(OWN, text)
    return f"{Path(found['file']).stem}-{found['name']}" if found else text.replace(":", "-")


def typed(text: str) -> str:
    """A task as it is given on the command line."""
    return text.removeprefix("environment:")


def moved(text: str, folder: str | Path) -> str:
    """The same FILE.py:NAME in another folder."""
    start, end = re.fullmatch(OWN, text).span("file")
    return f"{text[:start]}{Path(folder, file_of(text).name)}{text[end:]}"


def resolved(text: str) -> str:
    """A FILE.py:NAME with the absolute path of its file; any other text as it is."""
    return moved(text, os.path.abspath(file_of(text).parent)) if is_own(text) else text


def texts_of(config: Config) -> list[str]:
    """All that the user brings to a run."""
    return [text for text in (config.algo, config.task, config.optimizer, *config.reward) if is_own(text)]


def load(text: str, option: str = "--task", shipped: Mapping[str, Any] | None = None) -> Any:
    """The object of that name: one of those `shipped` with this code, or FILE.py:NAME of the user's own.

    Raises ValueError, in one line, for a file that is missing, has the name of another module, raises when it is
    imported (with the line), or lacks the name.
    """
    if shipped and text in shipped:
        return shipped[text]
    if not is_own(text):
        known = ", ".join(shipped or {})
        raise ValueError(f"{option} {text!r} is none of {known}, nor FILE.py:NAME{nearest(text, shipped or {})}")
    file, name = file_of(text), re.fullmatch(OWN, text)["name"]
    module = _module(text, file, option)
    if hasattr(module, name):
        return getattr(module, name)
    defined = [word for word, value in vars(module).items() if getattr(value, "__module__", "") == file.stem]
    raise ValueError(f"{option} {file} has no {name}; it has {', '.join(defined) or 'none'}{nearest(name, defined)}")


def _module(text: str, file: Path, option: str) -> ModuleType:
    """The module of a user's file, imported once in a process."""
    if not file.is_file():
        raise ValueError(f"{option} {typed(text)}: there is no file {file}; give FILE.py:NAME")
    if not file.stem.isidentifier():
        raise ValueError(f"{option} {file}: {file.stem} cannot be a module's name; use letters, digits and _ alone")
    if _place_of(sys.modules.get(file.stem)) == file:
        return sys.modules[file.stem]
    folder = os.path.abspath(file.parent)
    if folder not in sys.path:
        sys.path.append(folder)
    importlib.invalidate_caches()
    with blamed(text, option):
        parts = files([text])
    for stem in dict.fromkeys(Path(part).parts[0].removesuffix(".py") for part in parts):
        there = Path(folder, stem if Path(folder, stem).is_dir() else f"{stem}.py")
        found = importlib.util.find_spec(stem)
        places = [*(found.submodule_search_locations or ()), found.origin or found.name]
        if not any(os.path.exists(place) and os.path.samefile(place, there) for place in places):
            raise ValueError(f"{option} {there} has the name of another module ({places[-1]}); rename it")
    with blamed(text, option):
        return importlib.import_module(file.stem)


def _place_of(module: ModuleType | None) -> Path | None:
    place = getattr(module, "__file__", None)
    return place and Path(place)


@contextlib.contextmanager
def blamed(text: str, option: str = "--task") -> Iterator[None]:
    """Turn what a user's own code raises here into a ValueError of one line, with its file and line."""
    try:
        yield
    except (Exception, SystemExit) as error:  # foreign code may raise anything
        raise ValueError(f"{option} {typed(text)}: {where(error, text)}") from error


class LimitedCalls:
    """Calls a user's own task, each time within a limit. A daemon thread does it, and is left behind if it hangs."""

    def __init__(self, config: Config):
        self.config = config
        self._inbox: queue.SimpleQueue[tuple[Future, Callable]] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name="task", daemon=True).start()

    def call(self, function: Callable[[], Any], option: str, *, what: str) -> Any:
        """What a function gives, within the seconds of an option.

        Raises what the function raises, and ValueError, in one line that says `what` is not there, after that time.
        """
        limit_s = getattr(self.config, option)
        result: Future = Future()
        self._inbox.put((result, function))
        try:
            return result.result(limit_s)
        except TimeoutError:
            if result.done():  # the function raised it
                raise
            raise ValueError(
                f"--task {typed(self.config.task)}: {what} is not there after {limit_s:g} s; fix it, or raise "
                f"--{flag(option)} if it is only slow"
            ) from None

    def _serve(self) -> None:
        while True:
            result, function = self._inbox.get()
            try:
                result.set_result(function())
            except BaseException as error:  # it is raised where the result is waited for
                result.set_exception(error)


def where(error: BaseException, text: str) -> str:
    """Where in a user's own code an error comes from, and what it says, on one line; just that for shipped code."""
    if not is_own(text):
        return str(error)
    folder, place = Path(os.path.abspath(file_of(text))).parent, file_of(text).name
    frames = traceback.extract_tb(error.__traceback__)
    inside = [f for f in frames if Path(f.filename).is_relative_to(folder) and "site-packages" not in f.filename]
    if isinstance(error, SyntaxError) and error.filename:
        place = f"{Path(error.filename).name}, line {error.lineno}"
    elif inside:
        place = f"{Path(inside[-1].filename).name}, line {inside[-1].lineno}"
    said = " ".join(str(error).split())[:_MAX_REASON]
    return f"{place}: {type(error).__name__}{': ' if said else ''}{said}"


def files(texts: Iterable[str]) -> dict[str, Path]:
    """Files that users bring by their place in their folder: those that are named, and what they import from there."""
    found: dict[str, Path] = {}
    for text in texts:
        folder, waiting = file_of(text).parent, [file_of(text)]
        while waiting:
            path = waiting.pop()
            place = path.relative_to(folder).as_posix()
            if place not in found:
                found[place] = path
                waiting += _imported(path, folder)
            elif found[place] != path:
                raise ValueError(f"{path} and {found[place]} would be one module; rename one of the two")
    return found


def _imported(path: Path, folder: Path) -> Iterator[Path]:
    """What a file imports that lies in a folder, but for this code's own."""
    ours = [p.stem for p in ROOT.glob("*.py")] + [p.parent.name for p in ROOT.glob("*/__init__.py")]
    for node in ast.walk(ast.parse(path.read_bytes(), filename=str(path))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module]
        for first in {name.partition(".")[0] for name in names} - set(ours):
            file = folder / f"{first}.py"
            yield from [file] if file.is_file() else sorted((folder / first).rglob("*.py"))


def digest(texts: Iterable[str]) -> str:
    """SHA-256 over all that users bring: the places and the contents of their files; empty for none.

    Raises OSError for a file that is missing, and SyntaxError for what is no Python.
    """
    texts, sha256 = list(texts), hashlib.sha256()
    for place, path in sorted(files(texts).items()):
        content = path.read_bytes()
        sha256.update(f"{place} {len(content)}\n".encode() + content)
    return sha256.hexdigest() if texts else ""


def are_as(texts: Iterable[str], expected: str) -> bool:
    """Whether the files that users bring are there, and have this digest."""
    try:
        return digest(texts) == expected
    except (OSError, SyntaxError):
        return False


def found_again(config: Config, expected: str, code: Path) -> dict[str, Any]:
    """Options that find what the user brings to a run as it began with it: none if the files have this digest still,
    and else those of their copies in `code`.

    Raises ValueError, in one line, if these are not what the run began with either.
    """
    texts = texts_of(config)
    if are_as(texts, expected):
        return {}
    copies = {text: moved(text, code) for text in texts}
    if not are_as(copies.values(), expected):
        raise ValueError(f"{code} is not what the run began with; put the files back, or begin a new run")
    changed = ", ".join(str(file_of(text)) for text in texts)
    print(f"{changed}: changed or gone; the run goes on with the copies in {code}", flush=True)
    found = {name: copies[text] for name in ("algo", "task", "optimizer") if (text := getattr(config, name)) in copies}
    return found | {"reward": tuple(copies.get(text, text) for text in config.reward)}


def copy(texts: Iterable[str], folder: Path) -> None:
    """Copy the files that users bring into a folder, which is made."""
    for place, path in files(texts).items():
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, folder / place)
