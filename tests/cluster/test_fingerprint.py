import pytest

from asyncrl.cluster.fingerprint import check_same, fingerprint
from asyncrl.config import Config


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
    mine = node(tmp_path / "mine", Config(lr=0.2), one="1", two="1", same="")
    other = node(tmp_path / "other", Config(lr=0.1), one="2", more="", same="")
    line = (
        rf"^node 1 \(b\) does not run the same as node 0 \(a\): one.py {DIGEST} instead of {DIGEST}; two.py absent "
        rf"instead of {DIGEST}; --lr 0.1 instead of 0.2; more.py {DIGEST} instead of absent; start all nodes .*differ$"
    )
    with pytest.raises(ValueError, match=line):
        check_same({"node 0 (a)": mine, "node 1 (b)": other})
    many = node(tmp_path / "many", **{f"module_{i}": "" for i in range(6)})
    with pytest.raises(ValueError, match=r"; and 5 more; start all nodes "):
        check_same({"node 0 (a)": mine, "node 1 (b)": many})
