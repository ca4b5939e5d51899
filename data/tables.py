"""Tasks of rows: jsonl and parquet files, folders that `datasets` can load, or the hub; and how rows are split.

Rows of .jsonl files are read as they are: `datasets` would give each row the columns of all others, also inside them.
"""

import functools
import itertools
import json
import os
import random
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from data.problem import HELD_OUT_SEED, Problem, Task, distinct, prompt_key, split_hash

FORMS = (
    "a folder of parquet or jsonl files (train*, test*), one such file, "
    "or a folder that datasets' save_to_disk wrote"
)
TEST_SPLITS = ("test", "validation")
HUB_PROBE_S = 5.0
"""Longest wait for the hub to answer at all, seconds."""


def load_splits(path: str | None, hub_name: str = "", hub_part: str = "") -> dict[str, list[dict]]:
    """Split name to rows, of a local copy, or without one of a dataset of the hub.

    Raises ValueError if they cannot be read, in seconds also without a network. It says how to use a local copy.
    """
    import datasets

    hint = f"--data-path takes {f'a local copy of {hub_name}' if hub_name else 'rows'}: {FORMS}"
    if path is not None and not os.path.exists(path):
        raise ValueError(f"--data-path {path} does not exist; {hint}")
    try:
        loaded = _load_from_hub(hub_name, hub_part) if path is None else _load_from_disk(Path(path))
        splits = loaded if isinstance(loaded, Mapping) else {"all": loaded}
        return {name: list(rows) for name, rows in splits.items()}
    except (OSError, ValueError, StopIteration, datasets.exceptions.DatasetsError) as error:
        # For an empty file datasets raises a StopIteration without words.
        reason = (str(error).splitlines() or ["no rows"])[0]
        raise ValueError(f"dataset {path or hub_name} cannot be had ({reason}); {hint}") from error


class RowTask(Task):
    """A task whose problems are the rows of a dataset, in a new order each epoch."""

    def __init__(
        self,
        seed: int,
        splits: dict[str, list[dict]],
        read_row: Callable[[dict, str], Problem],
        *,
        source: str,
        held_out: float,
        shuffle: bool = True,
    ) -> None:
        """`read_row(row, place)` makes the problem of a row; `place` names the row in its errors, after `source`.

        Raises ValueError if nothing is left to train on, or nothing is held out.
        """
        self._seed = seed
        self._shuffle = shuffle
        problems = {
            name: [
                read_row(row, f"{source}, row {number} of {name},")
                for number, row in enumerate(rows)
            ]
            for name, rows in splits.items()
        }
        self._train, self._test = hold_out(problems, held_out)
        if not self._train or not self._test:
            raise ValueError(
                f"{source} gives {len(self._train)} training and {len(self._test)} held-out problems; give both: "
                "more rows, or held-out ones as a part called test"
            )

    def train_problem(self, index: int) -> Problem:
        """Problem number `index` ≥ 0. Each epoch has every training problem once."""
        epoch, position = divmod(index, len(self._train))
        if self._shuffle:
            position = shuffled(len(self._train), f"{self._seed}/{epoch}")[position]
        return self._train[position]

    def eval_problems(self, count: int) -> list[Problem]:
        """`count` distinct held-out problems, the same for every seed. Fewer if there are fewer."""
        return distinct((self._test[i] for i in shuffled(len(self._test), HELD_OUT_SEED)), count)


def hold_out(
    problems: dict[str, list[Problem]], share: float
) -> tuple[list[Problem], list[Problem]]:
    """Problems to train on and problems held out, of which none has a prompt of the other part.

    The split that is called so (TEST_SPLITS) is held out. Without one it is a `share` by hash of the prompts, or at
    least one.
    """
    name = next((name for name in TEST_SPLITS if name in problems and "train" in problems), None)
    if name:
        train, test = problems["train"], problems[name]
    else:
        train = all_rows(problems)
        least = min((split_hash(problem.prompt) for problem in train), default=0.0)
        test = [problem for problem in train if split_hash(problem.prompt) <= max(share, least)]
    held_out = {prompt_key(problem.prompt) for problem in test}
    return [problem for problem in train if prompt_key(problem.prompt) not in held_out], test


def all_rows(splits: dict[str, list]) -> list:
    """The rows of all splits."""
    return list(itertools.chain.from_iterable(splits.values()))


@functools.lru_cache(maxsize=4)
def shuffled(length: int, seed: str) -> tuple[int, ...]:
    """Positions of `length` problems in an order that depends on the seed only."""
    order = list(range(length))
    random.Random(seed).shuffle(order)
    return tuple(order)


def _load_from_hub(name: str, part: str):
    """A part of a dataset of the hub: downloaded, or as it is in the local cache if the hub does not answer."""
    import datasets
    from huggingface_hub import snapshot_download

    folder = snapshot_download(
        name, repo_type="dataset", allow_patterns=f"{part}/*", etag_timeout=HUB_PROBE_S
    )
    return datasets.load_dataset(os.path.join(folder, part))


def _load_from_disk(path: Path):
    """What a file or folder holds: rows, or splits of rows."""
    import datasets

    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    if files and all(file.suffix == ".jsonl" for file in files):
        return _read_jsonl(files)
    if path.is_file():
        if path.suffix not in (".parquet", ".json"):
            raise ValueError("a single file must end in .parquet, .jsonl or .json")
        return datasets.load_dataset(path.suffix[1:], data_files=str(path))
    if any((path / name).exists() for name in ("dataset_dict.json", "state.json")):
        return datasets.load_from_disk(str(path))
    return datasets.load_dataset(str(path))


def _read_jsonl(files: Iterable[Path]) -> dict[str, list[dict]]:
    """Rows of files by split. A file's name begins with its split; without one it is for training."""
    splits: dict[str, list[dict]] = {}
    for file in files:
        name = next((name for name in TEST_SPLITS if file.name.startswith(name)), "train")
        rows = splits.setdefault(name, [])
        for number, line in enumerate(file.read_bytes().splitlines(), start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise ValueError(f"{line[:60]!r} is no JSON object")
            except ValueError as error:
                raise ValueError(f"{file.name}, line {number}: {error}") from None
            rows.append(row)
    if not any(splits.values()):
        raise ValueError("no rows")
    return splits
