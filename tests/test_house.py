"""The import rule: only downwards, and rooms on one floor never import each other. Nothing imports scripts."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FLOORS = (
    "config", "data algos", "cluster records weights", "trainer controller engine", "rollout", "job", "train_async"
)  # fmt: skip
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms.split()}
FILES = [path for room in FLOOR for path in (*ROOT.glob(f"{room}.py"), *ROOT.glob(f"{room}/*.py"))]
LAZY = ("vllm", "wandb")


def imports(path: Path, tree: ast.AST, top_only: bool = False) -> set[str]:
    """The first names of all that is imported."""
    nodes = tree.body if top_only else ast.walk(tree)
    names = [n.module or "" for n in nodes if isinstance(n, ast.ImportFrom)]
    names += [a.name for n in (tree.body if top_only else ast.walk(tree)) if isinstance(n, ast.Import) for a in n.names]
    return {name.split(".")[0] for name in names}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_file_imports_only_from_its_own_room_and_from_lower_floors(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    room = path.relative_to(ROOT).parts[0].removesuffix(".py")
    upwards = {name for name in imports(path, tree) - {room} if FLOOR.get(name, -1) >= FLOOR[room]}
    assert not upwards | imports(path, tree) & {"scripts"}, f"{path} imports {upwards}"
    if path.name != "extension.py":
        assert not imports(path, tree, top_only=True) & set(LAZY)
    if room not in ("engine", "weights"):
        assert "vllm" not in imports(path, tree)
