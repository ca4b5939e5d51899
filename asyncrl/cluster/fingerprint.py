"""A comparison of all nodes' code and options. If they differ, collectives hang, or two trainings are mixed."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

from asyncrl import ROOT
from asyncrl.config import OPTIONS, ChangeableBy, Config, options_changeable_by
from asyncrl.user_code import files, user_code_names

FOLDERS = ("algos", "data", "asyncrl", "extras")


def digest(files_by_name: Mapping[str, Path]) -> str:
    """Return one digest of the names and contents of files. Raises OSError for a missing file."""
    contents = sorted((name, path.read_bytes()) for name, path in files_by_name.items())
    return hashlib.sha256(str(contents).encode()).hexdigest()[:16]


def code_digest(root: Path = Path(ROOT)) -> str:
    """Return one digest of all source files of a run, without its tests."""
    paths = [*root.glob("*.py")]
    for folder in FOLDERS:
        paths += root.joinpath(folder).rglob("*.py")
    files_by_name = {path.relative_to(root): path for path in paths}
    return digest(
        {str(name): path for name, path in files_by_name.items() if "tests" not in name.parts}
    )


def user_code_digests(config: Config) -> dict[str, str]:
    """Return a digest of each file of a run's user code, by its path. Raises OSError for a missing file."""
    return {
        str(path): digest({place: path}) for place, path in files(user_code_names(config)).items()
    }


def fingerprint(config: Config) -> dict[str, str]:
    """Return values that must be equal on all nodes: digests of the source files and of user code, and options."""
    options = {
        o.flag: str(o.value_in(config))
        for o in OPTIONS.values()
        if ChangeableBy.NODE not in o.changeable_by
    }
    return {"code": code_digest()} | user_code_digests(config) | options


def check_same(fingerprints: dict[str, dict[str, str]]) -> None:
    """Raise ValueError if a node's fingerprint differs from the first one. Keys are names of nodes."""
    (first, expected), *other_nodes = fingerprints.items()
    for name, actual in other_nodes:
        differences = [
            f"{key} {actual.get(key, 'absent')} instead of {expected.get(key, 'absent')}"
            for key in expected | actual
            if actual.get(key) != expected.get(key)
        ]
        if differences:
            allowed = ", ".join(option.flag for option in options_changeable_by(ChangeableBy.NODE))
            raise ValueError(
                f"{name} does not run the same as {first}: {'; '.join(differences)}; start all nodes from one commit "
                f"and with the same options, of which only {allowed} may differ"
            )
