"""Tasks of rows: jsonl, parquet, json and csv files, folders of them, or the hub; and how rows are split.

Rows of .jsonl and .json files are read as they are: `datasets` would give each row the columns of all others, also
inside them, and each column one type.
"""

import codecs
import csv
import functools
import glob
import json
import os
import random
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from data.problem import (
    HELD_OUT_SEED,
    Problem,
    Task,
    check_unicode,
    distinct,
    prompt_key,
    split_hash,
)

FORMS = (
    "a folder of jsonl, json, csv or parquet files (train*, test*) of one configuration, one such file, "
    "or a folder that datasets' save_to_disk wrote"
)
SPLIT_WORDS = {
    "train": {"train", "training"},
    "test": {"test", "testing", "eval", "evaluation"},
    "validation": {"validation", "valid", "val", "dev", "heldout", "held", "holdout"},
}
"""Words in the name of a file or of a split that show the use of its rows. Rows of validation are held out if no part
is called test."""
READABLE = (".jsonl", ".parquet", ".json", ".csv")
UNREADABLE = (".ndjson", ".tsv", ".arrow", ".gz", ".zst", ".bz2", ".xz", ".zip")
"""Files of rows, too, that must not be passed over in a folder."""
NO_ROWS = ("dataset_info.json", "dataset_infos.json")
HUB_PROBE_S = 5.0
"""Longest wait for the hub to answer at all, seconds."""

Rows = list[tuple[str, dict]]
"""Rows, each after its place. Errors of a row name the place."""


def load_splits(path: str | None, hub_name: str = "", hub_part: str = "") -> dict[str, Rows]:
    """Return rows by split (see split_of): of the local copy at `path`, or the hub's dataset if that is None.

    Raises ValueError if they cannot be read, in seconds also without a network. The error shows how to use a local
    copy.
    """
    import datasets

    hint = f"--data-path takes {f'a local copy of {hub_name}' if hub_name else 'rows'}: {FORMS}"
    if path is not None and not os.path.exists(path):
        raise ValueError(f"--data-path {path} does not exist; {hint}")
    source = path or hub_name
    try:
        parts = _read(_hub_folder(hub_name, hub_part) if path is None else Path(path))
        if not any(parts.values()):
            raise ValueError("no rows")
        return _by_split(parts, source)
    except (OSError, ValueError, StopIteration, datasets.exceptions.DatasetsError) as error:
        # For an empty file datasets raises a StopIteration without words. Its own errors name a cause with the reason.
        is_wrapped = isinstance(error, datasets.exceptions.DatasetGenerationError)
        reason = str(error.__cause__ if is_wrapped and error.__cause__ else error) or "no rows"
        reason = " ".join(reason.splitlines()[:2])
        raise ValueError(f"dataset {source} cannot be had ({reason}); {hint}") from error


def placed(rows: Iterable[dict], source: str, part: str = "") -> Rows:
    """Return each row after its place: its number, from 0, in a part of a source."""
    behind = f" of {part}" * bool(part)
    return [(f"{source}, row {number}{behind}", row) for number, row in enumerate(rows)]


def split_of(part: str) -> str:
    """Return `train`, `test` or `validation`, by the words in the name of a file or split.

    The text is empty if no word fits. Raises ValueError for a name with two of them.
    """
    words = set(re.findall(r"[a-z]+", part.lower()))
    splits = [split for split, known in SPLIT_WORDS.items() if words & known]
    if len(splits) > 1:
        raise ValueError(f"{part} is called {' and '.join(splits)}; rename it")
    return splits[0] if splits else ""


def _by_split(parts: dict[str, list[dict]], source: str) -> dict[str, Rows]:
    """Rows by what their parts are called. Raises ValueError if some parts are called so, and others are not."""
    splits: dict[str, Rows] = {}
    for part, rows in parts.items():
        splits.setdefault(split_of(part), []).extend(placed(rows, source, part))
    if "" in splits and len(splits) > 1:
        unknown = ", ".join(part for part in parts if not split_of(part))
        known = ", ".join(sorted(set().union(*SPLIT_WORDS.values())))
        raise ValueError(
            f"other names say what rows are for, and {unknown} does not; rename it by one of {known}"
        )
    return splits


class RowTask(Task):
    """A task whose problems are the rows of a dataset, in a new order each epoch."""

    def __init__(
        self,
        seed: int,
        splits: dict[str, Rows],
        read_row: Callable[[dict, str], Problem],
        *,
        source: str,
        held_out: float,
        shuffle: bool = True,
    ) -> None:
        """`read_row(row, place)` makes the problem of a row; its errors begin with the `place`.

        Raises ValueError if a row is not Unicode, or if no row is left to train on or held out.
        """
        self._seed = seed
        self._shuffle = shuffle
        self.train, self.held_out = hold_out(
            {
                split: [_read_problem(read_row, row, place) for place, row in rows]
                for split, rows in splits.items()
            },
            held_out,
        )
        if not self.train or not self.held_out:
            raise ValueError(
                f"{source} gives {len(self.train)} training and {len(self.held_out)} held-out problems; give both: "
                "more rows, parts called train and test, or a single file, of which a share is held out"
            )
        self.rows = [*self.train, *self.held_out]
        parts = ", ".join(f"{len(rows)} {split}".strip() for split, rows in splits.items())
        counts = f"{len(self.train)} are trained on, {len(self.held_out)} are held out"
        self.summary = f"rows of {source}: {parts}; {counts}"

    def train_problem(self, index: int) -> Problem:
        """Problem number `index` ≥ 0. Each epoch has every training problem once."""
        epoch, position = divmod(index, len(self.train))
        if self._shuffle:
            position = shuffled(len(self.train), f"{self._seed}/{epoch}")[position]
        return self.train[position]

    def eval_problems(self, count: int) -> list[Problem]:
        """`count` distinct held-out problems, the same for every seed. Fewer if there are fewer."""
        return distinct(
            (self.held_out[i] for i in shuffled(len(self.held_out), HELD_OUT_SEED)), count
        )


def _read_problem(read_row: Callable[[dict, str], Problem], row: dict, place: str) -> Problem:
    """The problem of a row, with its place. Raises ValueError for half of a character."""
    problem = read_row(row, place)
    try:
        check_unicode(problem)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None
    return replace(problem, place=place)


def hold_out(splits: dict[str, list[Problem]], share: float) -> tuple[list[Problem], list[Problem]]:
    """Return problems to train on and problems held out. The two parts share no prompt.

    The split test is held out, or else validation. Without them it is a `share` by hash of the prompts, or at least
    one.
    """
    train = splits.get("train", splits.get("", []))
    test = splits.get("test", splits.get("validation"))
    if test is None:
        least = min((split_hash(problem.prompt) for problem in train), default=0.0)
        test = [problem for problem in train if split_hash(problem.prompt) <= max(share, least)]
    held_out = {prompt_key(problem.prompt) for problem in test}
    return [problem for problem in train if prompt_key(problem.prompt) not in held_out], test


@functools.lru_cache(maxsize=4)
def shuffled(length: int, seed: str) -> tuple[int, ...]:
    """Positions of `length` problems in an order that depends on the seed only."""
    order = list(range(length))
    random.Random(seed).shuffle(order)
    return tuple(order)


def _hub_folder(name: str, part: str) -> Path:
    """Return the folder of a part of a hub's dataset. It is downloaded, or cached if the hub does not answer."""
    from huggingface_hub import snapshot_download

    folder = snapshot_download(
        name, repo_type="dataset", allow_patterns=f"{part}/*", etag_timeout=HUB_PROBE_S
    )
    return Path(folder, part)


def _read(path: Path) -> dict[str, list[dict]]:
    """Return the rows of a file or folder by the name of their split or file. A single part has no name."""
    import datasets

    if path.is_file():
        return {"": _read_file(path)}
    if any((path / name).exists() for name in ("dataset_dict.json", "state.json")):
        loaded = datasets.load_from_disk(str(path))
    elif (path / "README.md").exists() and "\nconfigs:" in (path / "README.md").read_text("utf-8"):
        # The card of a dataset assigns its files to splits.
        loaded = datasets.load_dataset(str(path))
    else:
        return {str(file.relative_to(path)): _read_file(file) for file in _files(path)}
    parts = loaded if isinstance(loaded, dict) else {"": loaded}
    return {name: list(rows) for name, rows in parts.items()}


def _files(path: Path) -> list[Path]:
    """Return the files of rows in a folder, and in its folders named like splits, or in its only folder.

    Raises ValueError for files of several forms or in several folders.
    """
    files = [
        file
        for file in sorted([*path.glob("*"), *path.glob("*/*")])
        if file.suffix.lower() in READABLE + UNREADABLE
        and file.is_file()
        and file.name not in NO_ROWS
        and not re.search(r"(^|/)[._]", str(file.relative_to(path)))
    ]
    other_folders = {
        file.parent for file in files if file.parent != path and not split_of(file.parent.name)
    }
    if any(file.parent == path for file in files):
        files = [file for file in files if file.parent not in other_folders]
    elif len(other_folders) > 1:
        names = ", ".join(sorted(folder.name for folder in other_folders))
        raise ValueError(f"it has the folders {names}; give one of them, as {min(other_folders)}")
    forms = sorted({file.suffix.lower() for file in files})
    if len(forms) > 1:
        raise ValueError(f"it has files of several forms, {', '.join(forms)}; leave those of one")
    return files


def _read_file(file: Path) -> list[dict]:
    """Rows of a file."""
    import datasets

    form = file.suffix.lower()
    if form not in READABLE:
        raise ValueError(f"{file.name} must end in {', '.join(READABLE)}")
    if form == ".parquet":
        pattern = glob.escape(str(file))  # a path can have brackets
        return list(datasets.load_dataset("parquet", data_files=pattern, split="train"))
    if form == ".csv":
        return _read_csv(file)
    content = file.read_bytes().removeprefix(codecs.BOM_UTF8)
    if form == ".json" and content.lstrip().startswith(b"["):
        rows = json.loads(content)
        for number, row in enumerate(rows):
            if not isinstance(row, dict):
                raise ValueError(f"{file.name}, row {number}: {str(row)[:60]!r} is no JSON object")
        return rows
    rows = []
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError(f"{line[:60]!r} is no JSON object")
        except ValueError as error:
            raise ValueError(f"{file.name}, line {number}: {error}") from None
        rows.append(row)
    return rows


def _read_csv(file: Path) -> list[dict]:
    """Return the rows of a .csv file. All cells are texts.

    `datasets` would guess types: 007 becomes 7, 2.50 becomes 2.5, and None becomes empty.
    """
    csv.field_size_limit(sys.maxsize)
    with file.open(encoding="utf-8-sig", newline="") as lines:
        try:
            reader = csv.DictReader(lines, strict=True)
            names = reader.fieldnames or []
            for name in names:
                if names.count(name) > 1:
                    raise ValueError(f"{file.name} has two columns {name!r}; rename one of the two")
            rows = list(reader)
        except csv.Error as error:
            raise ValueError(f"{file.name}: {error}") from None
    for number, row in enumerate(rows):
        if None in row or None in row.values():
            raise ValueError(
                f"{file.name}, row {number} has not as many cells as there are columns; put cells that have commas in "
                "double quotes"
            )
    return rows
