"""The system: options, records and messages, and seven rooms.

Modules of this code are found by their place, in every process. So a file `data.py` of a user hides no module of this
code, whatever is on sys.path. A script's folder comes last there: its files hide no module of Python or of a library.
"""

import os  # these two are always loaded, so no file of a user can be meant
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
OUR_MODULES = ("algos", "asyncrl", "data", "extras", "rollout", "train_async")
PLACES = dict.fromkeys(OUR_MODULES, ROOT)
"""The folder of a top-level module, or its file. User code adds its own."""


class FindByPlace:
    """Finds the modules of PLACES."""

    @staticmethod
    def find_spec(name: str, path=None, target=None):
        """Return the place of a module, or None for a module outside PLACES."""
        place = PLACES.get(name)
        if place is None:
            return None
        from importlib import machinery, util

        if place.endswith(".py"):
            return util.spec_from_file_location(name, place)
        return machinery.PathFinder.find_spec(name, [place])


def _check_names() -> None:
    """Raise ImportError if a module of a user was imported under the name of a module of this code."""
    for name in sys.modules.keys() & OUR_MODULES:
        file = getattr(sys.modules[name], "__file__", None) or name
        if not os.path.abspath(file).startswith(os.path.join(ROOT, "")):
            raise ImportError(f"{file} has the name of a module of {ROOT}; rename it")


def _check_packages() -> None:
    """End the program, in one line, if this Python lacks the packages. It may be `python`, and not .venv/bin/python."""
    from importlib import util

    if util.find_spec("msgspec") is None:
        sys.exit(
            f"error: {sys.executable} lacks the packages of this code; write {ROOT}/.venv/bin/python, which "
            "bash scripts/install.sh makes"
        )


def _put_script_last() -> None:
    script = getattr(sys.modules["__main__"], "__file__", None) or ""
    folder = os.path.dirname(os.path.abspath(script))
    if sys.path[:1] == [folder] != [ROOT]:
        sys.path.append(sys.path.pop(0))


_check_names()
_put_script_last()
_check_packages()
sys.meta_path.insert(0, FindByPlace)
