"""Rows of a dataset and their split: jsonl and parquet files, folders that `datasets` can load, or the hub.

Rows of .jsonl files are read as they stand: `datasets` would give all rows the columns of all others, also inside them.
"""

import hashlib
import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping
from pathlib import Path

Rows = list[dict]
TEST_SPLITS = ("test", "validation")
_HUB_PROBE_S = 5.0


def load_splits(path: str | None, hub: str = "", part: str | None = None) -> dict[str, Rows]:
    """Split name to rows, from a local copy, or without one from the hub: `part` of the dataset `hub`.

    Raises ValueError, in seconds also without a network, that says how to point at a local copy.
    """
    import datasets

    hint = f"--data-path takes {f'a local copy of {hub}' if hub else 'rows'}: a folder of parquet or jsonl files "
    hint += "(train*, test*), one such file, or a folder that datasets' save_to_disk wrote"
    if path is not None and not os.path.exists(path):
        raise ValueError(f"--data-path {path} does not exist; {hint}")
    try:
        loaded = _load_from_hub(hub, part) if path is None else _load_from_disk(Path(path))
    except (OSError, ValueError, StopIteration, datasets.exceptions.DatasetsError) as error:
        empty = isinstance(error, StopIteration)  # pyarrow's end is what datasets meets first
        reason = "no rows" if empty else str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"dataset {path or hub} cannot be had ({reason}); {hint}") from error
    loaded = loaded if isinstance(loaded, Mapping) else {"all": loaded}
    try:
        return {name: list(rows) for name, rows in loaded.items()}
    except UnicodeDecodeError as error:
        raise ValueError(f"dataset {path or hub} is not UTF-8: {error}") from None


def split(splits: dict[str, Rows], prompt_of, share: float, source: str) -> tuple[Rows, Rows]:
    """Rows to train on and rows held out, of which none has the prompt of another part.

    Held out is what is called so (TEST_SPLITS), and of rows without such a part the `share` by hash of their prompt, or
    one. Raises ValueError if one of the two would be empty.
    """
    named = next((name for name in TEST_SPLITS if name in splits and "train" in splits), None)
    if named:
        train, test = splits["train"], splits[named]
    else:
        train = test = [row for rows in splits.values() for row in rows]
        least = min((hashed(prompt_of(row)) for row in test), default=0.0)
        test = [row for row in test if hashed(prompt_of(row)) <= max(share, least)]
    held_out = {key_of(prompt_of(row)) for row in test}
    train = [row for row in train if key_of(prompt_of(row)) not in held_out]
    if not train or not test:
        raise ValueError(f"{source} gives {len(train)} training and {len(test)} held-out problems; both must have some")
    return train, test


def key_of(prompt: str | list) -> str:
    """A prompt, text or chat messages, as a text that is equal for equal ones alone."""
    return prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True)


def hashed(prompt: str | list) -> float:
    """A number in [0, 1) by a hash of a prompt that is the same in every process (Python's own is not)."""
    return int.from_bytes(hashlib.blake2b(key_of(prompt).encode(), digest_size=8).digest(), "big") / 2**64


def _load_from_hub(hub: str, part: str | None):
    import datasets
    from huggingface_hub import constants

    if not _answers(constants.ENDPOINT):
        # Otherwise five retries with back-off (23 s) come before the look into the local cache.
        datasets.config.HF_HUB_OFFLINE = True
    return datasets.load_dataset(hub, part)


def _answers(url: str) -> bool:
    try:
        urllib.request.urlopen(url, timeout=_HUB_PROBE_S).close()
    except urllib.error.HTTPError:
        return True  # it said no, but it spoke
    except OSError:
        return False
    return True


def _load_from_disk(path: Path):
    import datasets

    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    if files and all(file.suffix == ".jsonl" for file in files):
        return _read_jsonl(files)
    if path.is_file():
        kind = {".parquet": "parquet", ".json": "json"}.get(path.suffix)
        if kind is None:
            raise ValueError("a single file must end in .parquet, .jsonl or .json")
        return datasets.load_dataset(kind, data_files=str(path))
    if any((path / name).exists() for name in ("dataset_dict.json", "state.json")):
        return datasets.load_from_disk(str(path))
    return datasets.load_dataset(str(path))


def _read_jsonl(files: Iterable[Path]) -> dict[str, Rows]:
    """Rows of files by split: what a file's name begins with."""
    splits: dict[str, Rows] = {}
    for file in files:
        name = next((name for name in ("train", *TEST_SPLITS) if file.name.startswith(name)), "train")
        rows = splits.setdefault(name, [])
        for number, line in enumerate(file.read_bytes().splitlines(), start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{file.name}, line {number}: {error}") from None
            if not isinstance(row, dict):
                raise ValueError(f"{file.name}, line {number}: {line[:60]!r} is no JSON object")
            rows.append(row)
    if not any(splits.values()):
        raise ValueError("no rows")
    return splits
