#!/usr/bin/env bash
# Which changes of the code no test notices: bash scripts/mutation.sh FOLDER_OR_FILE TESTS...
# For example: bash scripts/mutation.sh algos tests/algos
# mutmut makes one change at a time in a copy of the last commit, and runs the tests that reach it, in one process of the
# lowest priority. At the end stand the counts of each file, and the changes that survived or that no test reaches.
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -ge 2 ] || { echo "error: give a folder or file, and its tests, as in: scripts/mutation.sh algos tests/algos" >&2; exit 2; }

commands=$PWD/.venv/bin
[ -x "$commands/mutmut" ] || { echo "error: mutmut is missing; bash scripts/install.sh --dev installs it" >&2; exit 1; }
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
git archive HEAD | tar -x -C "$copy"
cd "$copy"
unset PYTHONPATH # the copy is imported, and not the repository

"$commands/python" - "$@" <<'PYTHON'
import ast
import json
import sys
from pathlib import Path

target, *tests = sys.argv[1:]
files = [Path(target)] if target.endswith(".py") else sorted(Path(target).rglob("*.py"))
for path in files:
    # mutmut leaves decorated functions alone, so here a statement after the function decorates it.
    lines = path.read_text().splitlines()
    for node in reversed(ast.parse("\n".join(lines)).body):
        if not isinstance(node, ast.FunctionDef):
            continue
        for decorator in node.decorator_list:
            lines[decorator.lineno - 1 : decorator.end_lineno] = [""] * (decorator.end_lineno - decorator.lineno + 1)
            lines.insert(node.end_lineno, f"{node.name} = ({ast.unparse(decorator)})({node.name})")
    path.write_text("\n".join(lines) + "\n")
source = Path(target).parts[0]
options = {
    "source_paths": [source],
    "only_mutate": [str(path) for path in files],
    "also_copy": [path.name for path in Path().iterdir() if path.name != source],
    # pytest would collect garbage ten times after the tests of each change.
    "pytest_add_cli_args": ["-n0", "-p", "no:cacheprovider", "-p", "no:unraisableexception"],
    "pytest_add_cli_args_test_selection": tests,
    "use_git_change_detection": False,
}
with open("pyproject.toml", "a") as file:
    file.write("\n[tool.mutmut]\n")
    file.writelines(f"{name} = {json.dumps(value)}\n" for name, value in options.items())
PYTHON

OMP_NUM_THREADS=1 nice -n 19 "$commands/mutmut" run --max-children 1 >mutmut.log || { tail -n 40 mutmut.log >&2; exit 1; }
"$commands/mutmut" results --all true >results.txt
"$commands/python" - "$commands/mutmut" <<'PYTHON'
import collections
import re
import subprocess
import sys
from pathlib import Path

NOTICED = ("killed", "timeout")
STATUSES = (*NOTICED, "survived", "no tests")
counts = collections.defaultdict(collections.Counter)
missed = []
for mutant, module, status in re.findall(r"^ *(([\w.]+)\.x\S+): (.+)$", Path("results.txt").read_text(), re.MULTILINE):
    counts[module.replace(".", "/") + ".py"][status] += 1
    if status not in NOTICED:
        missed.append((mutant, status))
print("file", "noticed", *STATUSES, sep="\t")
for path, count in sorted(counts.items()):
    noticed = sum(count[status] for status in NOTICED) / count.total()
    print(path, f"{noticed:.1%}", *(count[status] for status in STATUSES), sep="\t")
for mutant, status in missed:
    diff = subprocess.run([sys.argv[1], "show", mutant], capture_output=True, text=True).stdout
    changed = [line for line in diff.splitlines() if re.match(r"[-+](?![-+]{2})", line)]
    print(f"\n{mutant}: {status}", *changed, sep="\n")
PYTHON
