"""A comparison of all nodes' code and options. If they differ, collectives hang, or two trainings are mixed."""

import hashlib
from pathlib import Path

from asyncrl import ROOT
from asyncrl.config import OPTIONS, ChangeableBy, Config, options_changeable_by
from asyncrl.user_code import files, user_code_names

FOLDERS = ("algos", "data", "asyncrl", "extras")
MAX_SHOWN = 5
"""Most differences that an error names."""


def fingerprint(config: Config, root: Path = Path(ROOT)) -> dict[str, str]:
    """Return values that must be equal on all nodes: hashes of source files, with user code, and options."""
    paths = [*root.glob("*.py")]
    for folder in FOLDERS:
        paths += root.joinpath(folder).rglob("*.py")
    sources = {
        str(path.relative_to(root)): path for path in sorted(paths) if "tests" not in path.parts
    }
    sources |= {str(path): path for path in files(user_code_names(config)).values()}
    hashes = {
        name: hashlib.sha256(path.read_bytes()).hexdigest()[:16] for name, path in sources.items()
    }
    options = {
        o.flag: str(o.value_in(config))
        for o in OPTIONS.values()
        if ChangeableBy.NODE not in o.changeable_by
    }
    return hashes | options


def check_same(fingerprints: dict[str, dict[str, str]]) -> None:
    """Raise ValueError if a node's fingerprint differs from the first one. Keys are names of nodes."""
    (first, expected), *other_nodes = fingerprints.items()
    for name, actual in other_nodes:
        differences = [
            f"{key} {actual.get(key, 'absent')} instead of {expected.get(key, 'absent')}"
            for key in expected | actual
            if actual.get(key) != expected.get(key)
        ]
        if len(differences) > MAX_SHOWN:
            differences[MAX_SHOWN:] = [f"and {len(differences) - MAX_SHOWN} more"]
        if differences:
            allowed = ", ".join(option.flag for option in options_changeable_by(ChangeableBy.NODE))
            raise ValueError(
                f"{name} does not run the same as {first}: {'; '.join(differences)}; start all nodes from one commit "
                f"and with the same options, of which only {allowed} may differ"
            )
