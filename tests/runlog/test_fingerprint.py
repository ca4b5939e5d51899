import re

import pytest

from asyncrl.config import Config
from asyncrl.runlog.fingerprint import check_same, fingerprint


def folder_with(path, **files):
    path.mkdir()
    for name, text in files.items():
        (path / f"{name}.py").write_text(text)
    return path


def test_nodes_may_differ_in_where_their_files_are_and_in_the_size_of_their_devices():
    one = Config(data_path="/a", runs_dir="/b", num_rollout_workers=2, max_running_requests=8)
    check_same(
        {
            "node 0": fingerprint(one),
            "node 1": fingerprint(Config()),
            "node 2": fingerprint(Config()),
        }
    )


def test_another_option_is_named_with_both_values():
    with pytest.raises(
        ValueError,
        match=r"node 1 \(b\) does not run the same as node 0 \(a\): --lr 0.1 instead of 0.2;",
    ):
        check_same(
            {"node 0 (a)": fingerprint(Config(lr=0.2)), "node 1 (b)": fingerprint(Config(lr=0.1))}
        )


def test_other_code_is_named_file_by_file(tmp_path):
    mine = fingerprint(
        Config(), folder_with(tmp_path / "mine", policy="one", batch="same", extra="")
    )
    other = fingerprint(
        Config(), folder_with(tmp_path / "other", policy="two", batch="same", more="")
    )
    with pytest.raises(ValueError) as caught:
        check_same({"node 0": mine, "node 1": other})
    digest = "[0-9a-f]{16}"
    assert re.search(
        f"extra.py absent instead of {digest}; policy.py {digest} instead of {digest}; "
        f"more.py {digest} instead of absent; start all",
        str(caught.value),
    )


def test_of_many_differences_a_few_are_named(tmp_path):
    mine = folder_with(tmp_path / "mine", **{f"module_{i}": "one" for i in range(9)})
    other = folder_with(tmp_path / "other", **{f"module_{i}": "two" for i in range(9)})
    with pytest.raises(
        ValueError, match=r"module_4\.py \w+ instead of \w+; and 4 more; start all"
    ) as caught:
        check_same({"node 0": fingerprint(Config(), mine), "node 1": fingerprint(Config(), other)})
    assert "\n" not in str(caught.value)


def test_the_code_of_a_run_is_in_the_fingerprint():
    found = fingerprint(Config())
    assert {
        "asyncrl/trainer/policy.py",
        "train_async.py",
        "algos/grpo.py",
        "data/problem.py",
    } <= found.keys()
