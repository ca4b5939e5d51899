import pytest

from asyncrl.cluster.fingerprint import check_same, code_digest, fingerprint
from asyncrl.config import Config


def test_nodes_may_differ_in_where_their_files_are_and_in_the_size_of_their_devices():
    config = Config(data_path="/a", runs_dir="/b", num_rollout_workers=2, max_running_requests=8)
    check_same({"node 0": fingerprint(config), "node 1": fingerprint(Config())})


def test_other_code_and_options_are_named_with_both_values():
    mine = fingerprint(Config(lr=0.2)) | {"code": "12", "mine.py": "34"}
    other = fingerprint(Config(lr=0.1)) | {"code": "56"}
    line = (
        r"^node 1 \(b\) does not run the same as node 0 \(a\): code 56 instead of 12; --lr 0.1 instead of 0.2; "
        r"mine.py absent instead of 34; start all nodes .*differ$"
    )
    with pytest.raises(ValueError, match=line):
        check_same({"node 0 (a)": mine, "node 1 (b)": other})


@pytest.mark.parametrize(
    ("path", "is_code"),
    [
        ("train.py", 1),
        ("algos/a.py", 1),
        ("extras/b/c.py", 1),
        ("extras/tests/d.py", 0),
        ("e.md", 0),
    ],
)
def test_the_digest_of_code_changes_with_every_file_but_those_of_tests(tmp_path, path, is_code):
    tmp_path = tmp_path / "tests"  # a checkout can be in a folder of that name
    file = tmp_path / path
    file.parent.mkdir(parents=True, exist_ok=True)
    digests = {code_digest(tmp_path)}
    for text in ("1", "2"):
        file.write_text(text)
        digests.add(code_digest(tmp_path))
    assert len(digests) == 1 + 2 * is_code
