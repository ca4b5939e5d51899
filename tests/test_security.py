"""What the code never does with what comes from outside: read off the syntax trees of all files but the tests."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("algos", "data", "asyncrl", "extras", "scripts")
PATHS = [
    *ROOT.glob("*.py"),
    *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")),
]
SOURCES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in PATHS
    if "tests" not in path.parts
}
PICKLES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
MAY_PICKLE = {
    "asyncrl/cluster/cluster.py": "leaders of one run, over the store of torch.distributed, which trusts whoever "
    "connects",
    "asyncrl/weights/ipc.py": "CUDA handles, from the trainer to the engine of its own worker",
}
RUNS_TEXT = r"((os|builtins)\.)?(eval|exec|compile|__import__|system|popen)"
TAKES_CODE = r"(.*\.)?Auto\w*\.(from_pretrained|from_config)"


def dangers(name: str, source: str) -> Iterator[str]:
    """What a file does that none should."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import() | ast.ImportFrom():
                modules = {getattr(node, "module", None), *(alias.name for alias in node.names)}
                if modules & PICKLES and name not in MAY_PICKLE:
                    yield f"imports {modules & PICKLES}"
            case ast.Call():
                yield from dangers_of_call(node)
            case ast.keyword("trust_remote_code", value):
                if ast.unparse(value) != "False":
                    yield "trusts remote code"
            case ast.Dict():  # options that become arguments
                for key, value in zip(node.keys, node.values, strict=True):
                    is_trust = isinstance(key, ast.Constant) and key.value == "trust_remote_code"
                    if is_trust and ast.unparse(value) != "False":
                        yield "trusts remote code"


def dangers_of_call(call: ast.Call) -> Iterator[str]:
    """What a call does that none should."""
    function = ast.unparse(call.func)
    given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    if re.fullmatch(RUNS_TEXT, function):
        yield f"{function} runs a text"
    if given.get("shell", "False") != "False":
        yield "a shell runs a text"
    if function == "torch.load" and given.get("weights_only") != "True":
        yield "torch.load without weights_only=True"
    if given.get("allow_pickle", "False") != "False":
        yield "numpy unpickles"
    if re.fullmatch(TAKES_CODE, function) and not given.keys() & {"trust_remote_code", None}:
        yield f"{function} without trust_remote_code=False"


def test_no_file_unpickles_or_runs_what_comes_from_outside():
    assert len(SOURCES) > 100
    by_file = {name: [*dangers(name, source)] for name, source in SOURCES.items()}
    assert {name: texts for name, texts in by_file.items() if texts} == {}


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
    assert [*dangers("file.py", source)]


def test_what_only_looks_like_a_danger_is_passed_over():
    fine = "model.eval(); re.compile('x'); torch.load(path, weights_only=True); AutoModel.from_pretrained(p, **options)"
    assert [*dangers("file.py", fine)] == []


def test_nothing_listens_on_all_addresses_unless_it_is_asked_to():
    """The texts of --listen, and where it names no host."""
    everywhere = {name for name, source in SOURCES.items() if "0.0.0.0" in source}
    assert everywhere == {"extras/swarm/swarm.py", "extras/planning/plan.py"}
