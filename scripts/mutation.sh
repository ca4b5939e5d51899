#!/usr/bin/env bash
# Which changes of the code no test notices: [CHANGES=PATTERN] bash scripts/mutation.sh FOLDER_OR_FILE TESTS...
# For example: bash scripts/mutation.sh algos tests/algos
# CHANGES='*[05]' tries every fifth change: those whose number ends in 0 or 5.
# mutmut makes one change at a time in a copy of the last commit, and runs the tests that reach it, in one process of the
# lowest priority. At the end stand the counts of each file, and the changes that survived or that no test reaches.
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -ge 2 ] || { echo "error: give a folder or file, and its tests, as in: scripts/mutation.sh algos tests/algos" >&2; exit 2; }

commands=$PWD/.venv/bin
[ -x "$commands/mutmut" ] || { echo "error: mutmut is missing; bash scripts/install.sh --dev installs it" >&2; exit 1; }
git cat-file -e "HEAD:$1" 2>/dev/null || { echo "error: the last commit has no $1; give a folder or file of it" >&2; exit 2; }
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
git archive HEAD | tar -x -C "$copy"
cd "$copy"
unset PYTHONPATH # the copy is imported, and not the repository
export OMP_NUM_THREADS=1

"$commands/python" - "$@" <<'PYTHON'
import ast
import json
import subprocess
import sys
from pathlib import Path

# pytest would collect garbage ten times after the tests of each change.
PYTEST_OPTIONS = ["-n0", "-p", "no:cacheprovider", "-p", "no:unraisableexception"]


def collected(tests):
    """Names of the tests that pytest chooses by arguments. Ends the script if it cannot choose one of them."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *PYTEST_OPTIONS, *tests]
    process = subprocess.run(command, capture_output=True, text=True)
    lines = process.stdout.splitlines()
    if process.returncode:
        faults = [line for line in lines + process.stderr.splitlines() if line.lower().startswith("error")]
        sys.exit("\n".join(["error: pytest cannot choose these tests:", *(faults or lines[-20:])]))
    return [line for line in lines if "::" in line]


def undecorate(lines, owner, indent=""):
    """Decorate each function by a statement after it, as mutmut leaves decorated functions alone."""
    for node in reversed(owner.body):
        if isinstance(node, ast.ClassDef):
            undecorate(lines, node, " " * 4)
        if not isinstance(node, ast.FunctionDef):
            continue
        for decorator in node.decorator_list:
            lines[decorator.lineno - 1 : decorator.end_lineno] = [""] * (decorator.end_lineno - decorator.lineno + 1)
            lines.insert(node.end_lineno, f"{indent}{node.name} = ({ast.unparse(decorator)})({node.name})")


target, *tests = sys.argv[1:]
# mutmut runs tests by their names. A name that pytest does not find again would look like a change that is noticed.
collected(collected(tests))
files = [Path(target)] if target.endswith(".py") else sorted(Path(target).rglob("*.py"))
for path in files:
    lines = path.read_text().splitlines()
    undecorate(lines, ast.parse("\n".join(lines)))
    path.write_text("\n".join(lines) + "\n")
source = Path(target).parts[0]
options = {
    "source_paths": [source],
    "only_mutate": [str(path) for path in files],
    "also_copy": [path.name for path in Path().iterdir() if path.name != source],
    "pytest_add_cli_args": PYTEST_OPTIONS,
    "pytest_add_cli_args_test_selection": tests,
    # torch does not survive a fork of a process that has computed
    "process_isolation": "forkserver",
    # seconds, which a change has 15 times of: mutmut does not count how long fixtures take
    "timeout_constant": 6.0,
    "use_git_change_detection": False,
}
with open("pyproject.toml", "a") as file:
    file.write("\n[tool.mutmut]\n")
    file.writelines(f"{name} = {json.dumps(value)}\n" for name, value in options.items())
PYTHON

nice -n 19 "$commands/mutmut" run --max-children 1 ${CHANGES:+"$CHANGES"} >mutmut.log || { tail -n 40 mutmut.log >&2; exit 1; }
"$commands/mutmut" results --all true >results.txt
"$commands/python" - "$commands/mutmut" <<'PYTHON'
import collections
import re
import subprocess
import sys
from pathlib import Path

NOTICED = ("killed", "timeout", "segfault")
MISSED = ("survived", "no tests")
counts = collections.defaultdict(collections.Counter)
missed = []
for mutant, module, status in re.findall(r"^ *(([\w.]+)\.x\S+): (.+)$", Path("results.txt").read_text(), re.MULTILINE):
    if status == "not checked":
        continue
    counts[module.replace(".", "/") + ".py"][status] += 1
    if status not in NOTICED:
        missed.append((mutant, status))
statuses = [*NOTICED, *MISSED, *sorted(set().union(*counts.values()) - {*NOTICED, *MISSED})]
print("file", "noticed", *statuses, sep="\t")
for path, count in sorted(counts.items()):
    noticed = sum(count[status] for status in NOTICED) / count.total()
    print(path, f"{noticed:.1%}", *(count[status] for status in statuses), sep="\t")
for mutant, status in missed:
    diff = subprocess.run([sys.argv[1], "show", mutant], capture_output=True, text=True).stdout
    changed = [line for line in diff.splitlines() if re.match(r"[-+](?![-+]{2})", line)]
    print(f"\n{mutant}: {status}", *changed, sep="\n")
PYTHON
