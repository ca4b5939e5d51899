"""What the code never does with what comes from outside. Ruff's rules in pyproject.toml see most of it."""

import ast
import re

from programs import ROOT

FOLDERS = ("algos", "data", "asyncrl", "extras", "scripts")
PATHS = [*ROOT.glob("*.py"), *(path for name in FOLDERS for path in (ROOT / name).rglob("*.py"))]
RUNS_CODE = re.compile(
    r"trust_remote_code\W+(?!False)\w|allow_pickle\W+(?!False)\w|weights_only\W+(?!True)\w"
)
"""A keyword or an entry of a dict by which a library would run code of a file."""
NEEDED = {
    re.compile(r"(.*\.)?Auto\w*\.(from_pretrained|from_config)"): "trust_remote_code",
    re.compile(r"torch\.load"): "weights_only",
}
"""Calls, and the keyword that each has to name, or get with others by **."""


def test_no_file_has_a_library_run_code_that_comes_with_data_or_a_model():
    sources = [path.read_text() for path in PATHS if "tests" not in path.parts]
    assert len(sources) > 100
    assert [RUNS_CODE.findall(source) for source in sources if RUNS_CODE.search(source)] == []
    for node in (node for source in sources for node in ast.walk(ast.parse(source))):
        if isinstance(node, ast.Call):
            text, given = ast.unparse(node.func), {keyword.arg for keyword in node.keywords}
            for function, keyword in NEEDED.items():
                assert not function.fullmatch(text) or {keyword, None} & given, ast.unparse(node)
