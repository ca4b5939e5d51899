"""What optional systems may not do: override or read private names of the core, or build classes at run time."""

import ast

import pytest
from programs import ROOT
from test_layout import FILES, imported_modules, name_of

EXTRAS = [path for path in FILES if path.relative_to(ROOT).parts[0] == "extras"]
TREES = {name_of(path): ast.parse(path.read_text(encoding="utf-8")) for path in FILES}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("_")


def private_names(tree: ast.AST) -> set[str]:
    """Private names that a syntax tree defines: functions, attributes, and what a class assigns in its body."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
        elif isinstance(node, ast.ClassDef):
            assigned = [
                child for child in node.body if isinstance(child, ast.Assign | ast.AnnAssign)
            ]
            for target in (
                getattr(child, "targets", [getattr(child, "target", None)]) for child in assigned
            ):
                names |= {name.id for name in target if isinstance(name, ast.Name)}
    return set(filter(is_private, names))


def classes() -> dict[str, list[ast.ClassDef]]:
    """Classes of the core by name."""
    found: dict[str, list[ast.ClassDef]] = {}
    for module, tree in TREES.items():
        if module.split(".")[0] not in ("extras", "scripts"):
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    found.setdefault(node.name, []).append(node)
    return found


CORE = classes()


def base_names(node: ast.ClassDef) -> set[str]:
    return {base.id for base in node.bases if isinstance(base, ast.Name)}


def names_of_bases(node: ast.ClassDef) -> set[str]:
    """Private names of all classes of the core from which a class descends."""
    names: set[str] = set()
    for base in base_names(node):
        for parent in CORE.get(base, []):
            names |= private_names(parent) | names_of_bases(parent)
    return names


def outside_names(module: str, tree: ast.AST) -> set[str]:
    """Private attributes that a module of an extra reads, and that neither it nor a module of its folder defines."""
    folder = module.rpartition(".")[0] if module.count(".") > 1 else module
    own = set()
    for other in TREES:
        if other == module or other.startswith(f"{folder}."):
            own |= private_names(TREES[other])
    ours = {name.split(".")[0] for name in imported_modules(tree)} & {"asyncrl", "rollout"}
    read = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    core = {
        name for parents in CORE.values() for parent in parents for name in private_names(parent)
    }
    return {name for name in read if is_private(name) and name in core - own and ours}


@pytest.mark.parametrize("path", EXTRAS, ids=name_of)
def test_an_optional_system_extends_the_core_by_public_names_only(path):
    module, tree = name_of(path), TREES[name_of(path)]
    assert not outside_names(module, tree), "private names of the core"
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            overridden = private_names(node) & names_of_bases(node)
            assert not overridden, f"{node.name} overrides {overridden}"
        if isinstance(node, ast.FunctionDef):
            built = [inner for inner in ast.walk(node) if isinstance(inner, ast.ClassDef)]
            given = {argument.arg for argument in node.args.args}
            for inner in built:
                assert not base_names(inner) & given, f"{node.name} builds {inner.name} at run time"
