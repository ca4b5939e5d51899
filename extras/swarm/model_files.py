"""The files of a model that a run sends to hosts that join, beside the weights."""

from pathlib import Path

SUFFIXES = (".json", ".jinja", ".txt", ".model", ".tiktoken")
MAX_MODEL_FILES_BYTES = 60 << 20
"""Below the largest message of a swarm."""


def model_files(folder: str) -> dict[str, bytes]:
    """The files of a model's folder that an engine needs beside its weights, by name: configuration and tokenizer.

    Raises ValueError if they are too large to be sent to a host that joins.
    """
    paths = [path for path in sorted(Path(folder).iterdir()) if path.suffix in SUFFIXES]
    files = {
        path.name: path.read_bytes() for path in paths if not path.name.endswith(".index.json")
    }
    num_bytes = sum(map(len, files.values()))
    if num_bytes > MAX_MODEL_FILES_BYTES:
        raise ValueError(
            f"configuration and tokenizer in {folder} have {num_bytes} bytes, at most {MAX_MODEL_FILES_BYTES} go to "
            "hosts that join; take away what is neither"
        )
    return files
