"""Whether all nodes run the same code with the same options; if not, their collectives would not match, or silently
train two things as one."""

import hashlib
from pathlib import Path

from asyncrl.config import OPTIONS, Config, May, options_for
from asyncrl.user_code import files, texts_of

FOLDERS = ("algos", "data", "asyncrl", "extras")
"""Where the source files of a run are, beside those at the top."""
MAX_SHOWN = 5
"""Differences that an error names."""


def fingerprint(config: Config, root: Path = Path(__file__).parents[1]) -> dict[str, str]:
    """All that must be equal on all nodes: each source file of a run with its hash, user code too, and each option with
    its value."""
    inside = [path for folder in FOLDERS for path in (root / folder).rglob("*.py")]
    sources = {
        path.relative_to(root).as_posix(): path
        for path in sorted([*root.glob("*.py"), *inside])
        if "tests" not in path.parts
    }
    sources |= {str(path): path for path in files(texts_of(config)).values()}
    code = {
        name: hashlib.sha256(path.read_bytes()).hexdigest()[:16] for name, path in sources.items()
    }
    options = {o.flag: str(o.value_in(config)) for o in OPTIONS.values() if May.NODE not in o.may}
    return code | options


def check_same(fingerprints: dict[str, dict[str, str]]) -> None:
    """Raise ValueError, in one line, if a node's fingerprint differs from the first; keys are the nodes' names."""
    (first, expected), *other_nodes = fingerprints.items()
    for name, actual in other_nodes:
        differences = [
            f"{key} {actual.get(key, 'absent')} instead of {expected.get(key, 'absent')}"
            for key in expected | actual
            if actual.get(key) != expected.get(key)
        ]
        if differences:
            shown = "; ".join(differences[:MAX_SHOWN])
            num_more = len(differences) - MAX_SHOWN
            more = f"; and {num_more} more" if num_more > 0 else ""
            allowed = ", ".join(option.flag for option in options_for(May.NODE))
            raise ValueError(
                f"{name} does not run the same as {first}: {shown}{more}; start all nodes from one commit and with "
                f"the same options, of which only {allowed} may differ"
            )
