import re

import pytest

from asyncrl.config import Config
from extras.fingerprint import check_same, fingerprint


def node(path, config=None, **files):
    """The fingerprint of a node with these files."""
    path.mkdir()
    for name, text in files.items():
        (path / f"{name}.py").write_text(text)
    return fingerprint(config or Config(), path)


def test_nodes_may_differ_in_where_their_files_are_and_in_the_size_of_their_devices():
    config = Config(data_path="/a", runs_dir="/b", num_rollout_workers=2, max_running_requests=8)
    mine = fingerprint(config)
    check_same({"node 0": mine, "node 1": fingerprint(Config())})
    assert {"asyncrl/trainer/policy.py", "train_async.py", "algos/grpo.py"} <= mine.keys()


DIGEST = "[0-9a-f]{16}"


def test_other_options_and_files_are_named_with_both_values_if_they_are_few(tmp_path):
    files = {f"module_{i}": "one" for i in range(3)}
    mine = node(tmp_path / "mine", Config(lr=0.2), policy="one", extra="", same="", **files)
    changed = dict.fromkeys(files, "two")
    other = node(tmp_path / "other", Config(lr=0.1), policy="two", more="", same="", **changed)
    with pytest.raises(ValueError) as caught:
        check_same({"node 0 (a)": mine, "node 1 (b)": other})
    modules = "".join(f"; module_{i}.py {DIGEST} instead of {DIGEST}" for i in range(3))
    assert re.match(
        rf"node 1 \(b\) does not run the same as node 0 \(a\): extra.py absent instead of {DIGEST}{modules}; "
        rf"policy.py {DIGEST} instead of {DIGEST}; and 2 more; start all nodes from one commit .*differ$",
        str(caught.value),
    )
    first = {name: value for name, value in mine.items() if not name.endswith(".py")}
    with pytest.raises(
        ValueError, match=r"\(a\): --lr 0.1 instead of 0.2; more.py \w+ instead of absent; start"
    ):
        check_same({"node 0 (a)": first, "node 1 (b)": {**first, "--lr": "0.1", "more.py": "f"}})
