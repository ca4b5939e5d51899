"""The import rule, the lengths of functions and of pages for newcomers, and the place of tests.

Imports run only downwards, and rooms of one floor never import each other.
"""

import ast
import graphlib
import re
from pathlib import Path

import pytest
from programs import ROOT

FLOORS = (
    {"algos", "data"},
    {"nano_async"},
    {
        "asyncrl.config",
        "asyncrl.extras",
        "asyncrl.messages",
        "asyncrl.plugins",
        "asyncrl.records",
        "asyncrl.tasks",
        "asyncrl.user_code",
    },
    {"asyncrl.cluster", "asyncrl.runlog", "asyncrl.weights"},
    {"asyncrl.controller", "asyncrl.engine", "asyncrl.trainer"},
    {"asyncrl.job"},
    {"rollout"},
    {"train_async"},
    {"extras"},
    {
        "extras.agents",
        "extras.certificate",
        "extras.environments",
        "extras.planning",
        "extras.router_replay",
        "extras.swarm",
        "extras.trees",
    },
    {"extras.simulation"},
    {"scripts"},
)
"""Rooms and single files, from the lowest floor to the highest. A swarm is simulated above the real one."""
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
SINGLE_FILES = FLOORS[2]
"""These files of one floor may import each other: together they are the vocabulary of the system."""
FOLDERS = ("algos", "data", "asyncrl", "extras", "scripts")
FILES = [
    *ROOT.glob("*.py"),
    *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")),
]
FILES = sorted(
    path
    for path in FILES
    if "tests" not in path.parts and not path.name.startswith(("test_", "conftest"))
)
MAX_FUNCTION_LINES = 45
MAX_LINES = {"README.md": 150, "AGENTS.md": 80, "CHANGELOG.md": 60}
"""Of pages that one reads in one sitting."""


def name_of(path: Path) -> str:
    """The dotted name of a module."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imported_modules(tree: ast.AST) -> set[str]:
    """Dotted names of all that a syntax tree imports, at the top and inside functions, also by importlib."""
    modules = set()
    for node in ast.walk(tree):
        if _is_import_by_name(node):
            modules |= {name.value for name in ast.walk(node) if isinstance(name, ast.Constant)}
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            modules |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return modules


def _is_import_by_name(node: ast.AST) -> bool:
    """Whether a node calls importlib.import_module or __import__."""
    called = getattr(node, "func", None)
    name = getattr(called, "attr", getattr(called, "id", ""))
    return name in ("import_module", "__import__")


def room_of(module: str) -> str | None:
    """The room, or the single file, that a module belongs to; None for what is not ours."""
    parts = module.split(".")
    return next((room for room in (".".join(parts[:2]), parts[0]) if room in FLOOR), None)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_run_only_downwards_and_no_function_is_longer_than_a_screen(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    room = room_of(name_of(path))
    if room == "asyncrl.plugins":  # its protocols name types of all rooms
        tree.body = [node for node in tree.body if not _is_for_types_only(node)]
    rooms = {room_of(module) for module in imported_modules(tree)} - {room, None}
    if room in SINGLE_FILES:
        rooms -= SINGLE_FILES
    upwards = {other for other in rooms if FLOOR[other] >= FLOOR[room]}
    assert not upwards, f"{path} imports {upwards}"
    assert "nano_async" not in rooms, f"{path} imports the file that stands apart"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno - node.lineno < MAX_FUNCTION_LINES, f"{path}: {node.name}"


IMPORT_BY_NAME = {
    "algos",
    "asyncrl.engine.reward_process",
    "asyncrl.extras",
    "asyncrl.user_code",
    "extras.agents.verifiers_task",
}
"""Modules that import a module whose name is not a constant: losses, optional systems, user code, slow libraries."""


def test_no_other_module_imports_by_a_name_that_is_computed():
    """A table of names would hide from the import rule what a module needs."""
    computed = {
        name_of(path)
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if _is_import_by_name(node) and not isinstance(node.args[0], ast.Constant)
    }
    assert computed <= IMPORT_BY_NAME


def test_no_module_imports_itself_through_others():
    modules = {name_of(path) for path in FILES}
    imports = {}
    for path in FILES:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        tree.body = [node for node in tree.body if not _is_for_types_only(node)]
        imports[name_of(path)] = imported_modules(tree) & modules - {name_of(path)}
    assert [*graphlib.TopologicalSorter(imports).static_order()], "or CycleError names the modules"


def _is_for_types_only(node: ast.AST) -> bool:
    """Whether a statement is `if TYPE_CHECKING:`."""
    return (
        isinstance(node, ast.If)
        and isinstance(node.test, ast.Name)
        and node.test.id == "TYPE_CHECKING"
    )


@pytest.mark.parametrize("page", MAX_LINES)
def test_pages_for_newcomers_are_one_sitting(page):
    assert len((ROOT / page).read_text(encoding="utf-8").splitlines()) <= MAX_LINES[page]


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_the_test_of_every_file_is_where_the_page_for_newcomers_says(path):
    """By its name, or in the table of tests/README.md."""
    folder, file = path.relative_to(ROOT).parent, f"test_{path.name}"
    by_name = ROOT / "tests" / str(folder).removeprefix("asyncrl").lstrip("/") / file
    if folder.parts[:1] == ("extras",):
        by_name = path.with_name(file) if len(folder.parts) == 1 else path.parent / "tests" / file
    if path.name == "__init__.py" or by_name.exists():
        return
    text = (ROOT / "tests/README.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line[:3] == "| `"]
    tests = [
        test
        for folders, files, tests in rows
        for test in re.findall("`(.*?)`", tests)
        if f"`{folder}`" in folders and {path.stem, "all"} & {*re.findall(r"\w+", files)}
    ]
    assert tests and all((ROOT / test).exists() for test in tests), tests
