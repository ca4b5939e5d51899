"""What the code never does with what comes from outside: read off the syntax trees of all files but the tests."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("algos", "data", "asyncrl", "extras", "scripts")
FILES = sorted(
    [*ROOT.glob("*.py"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))]
)
FILES = [path for path in FILES if "tests" not in path.parts]
PICKLES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
MAY_PICKLE = {
    "asyncrl/cluster/cluster.py": "leaders of one run, over the store of torch.distributed, which trusts whoever "
    "connects",
    "asyncrl/weights/ipc.py": "CUDA handles, from the trainer to the engine of its own worker",
}
RUNS_TEXT = {"eval", "exec", "compile", "__import__", "system", "popen"}


def calls(tree: ast.AST) -> list[tuple[str, str, ast.Call]]:
    """What each call is made on, the name of what is called, and the call."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            found.append(("", node.func.id, node))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            found.append((ast.unparse(node.func.value), node.func.attr, node))
    return found


def value_of(call: ast.Call, keyword: str):
    """The constant that a call gives a keyword; None if it gives none."""
    return next(
        (
            k.value.value
            for k in call.keywords
            if k.arg == keyword and isinstance(k.value, ast.Constant)
        ),
        None,
    )


def dangers(name: str, source: str) -> list[str]:
    """What a file does that none should."""
    tree, found = ast.parse(source), []
    imported = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    if imported & PICKLES and name not in MAY_PICKLE:
        found.append(f"imports {imported & PICKLES}")
    for owner, called, call in calls(tree):
        if called in RUNS_TEXT and owner in ("", "os", "builtins"):
            found.append(f"{called} runs a text")
        if value_of(call, "shell"):
            found.append("a shell runs a text")
        if owner == "torch" and called == "load" and value_of(call, "weights_only") is not True:
            found.append("torch.load without weights_only=True")
        if value_of(call, "allow_pickle"):
            found.append("numpy unpickles")
        takes_code = owner.rpartition(".")[2].startswith("Auto") and called in (
            "from_pretrained",
            "from_config",
        )
        is_given = any(keyword.arg in ("trust_remote_code", None) for keyword in call.keywords)
        if takes_code and not is_given:
            found.append(f"{owner}.{called} without trust_remote_code=False")
    for node in ast.walk(tree):  # as an argument, or in the options that are one
        pairs = [(node.arg, node.value)] if isinstance(node, ast.keyword) else []
        if isinstance(node, ast.Dict):
            pairs = [
                (getattr(key, "value", None), value)
                for key, value in zip(node.keys, node.values, strict=True)
            ]
        if any(
            key == "trust_remote_code" and getattr(value, "value", None) is not False
            for key, value in pairs
        ):
            found.append("trusts remote code")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_file_unpickles_or_runs_what_comes_from_outside(path):
    assert dangers(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "eval('1')",
        "import os\nos.system('ls')",
        "run(command, shell=True)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
        "AutoModel.from_pretrained(path)",
        "transformers.AutoConfig.from_pretrained(path, trust_remote_code=True)",
        "options = {'trust_remote_code': trust}",
    ],
)
def test_each_danger_is_seen(source):
    assert dangers("file.py", source)


def test_what_only_looks_like_a_danger_is_passed_over():
    fine = "model.eval(); re.compile('x'); torch.load(path, weights_only=True); AutoModel.from_pretrained(p, **options)"
    assert dangers("file.py", fine) == []


def test_nothing_listens_on_all_addresses_unless_it_is_asked_to():
    everywhere = {
        path.relative_to(ROOT).as_posix()
        for path in FILES
        if "0.0.0.0" in path.read_text(encoding="utf-8")
    }
    assert everywhere == {"extras/swarm/swarm.py", "extras/planning/plan.py"}, (
        "the texts of --listen, and where it names no host"
    )
