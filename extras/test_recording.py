import re

import pytest
from trajectories import make_group

from asyncrl.runlog.plain import encode
from extras.recording import batch_path, read_batch, write_batch

GROUPS = [make_group(7, (0.1, float("nan"))), make_group(2, (1.0, -0.0))]


def test_what_is_read_is_what_was_written_bit_by_bit_and_in_order(tmp_path):
    path = batch_path(tmp_path, 12)
    write_batch(path, 12, GROUPS)
    assert encode(read_batch(path, 12)) == encode(GROUPS)
    assert [file.name for file in path.parent.iterdir()] == ["step_000012.msgpack"]


def test_a_batch_that_cannot_be_written_whole_is_not_there(tmp_path):
    path = batch_path(tmp_path, 1)
    path.with_suffix(".tmp").mkdir(parents=True)  # no file can be opened there
    with pytest.raises(OSError):
        write_batch(path, 1, GROUPS)
    assert not path.exists()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda whole: whole, "is the batch of step 3, not 4"),
        (lambda whole: whole[: len(whole) // 2], "is no recorded batch"),
        (lambda whole: b"\x80", "is no recorded batch"),  # an empty record
        (
            lambda whole: re.sub(b"num_turns", b"num_tunes", whole),
            r"another version of this code[^\n]*`num_turns`",
        ),
    ],
)
def test_a_file_that_is_no_batch_or_another_steps_or_another_versions_is_refused_in_one_line(
    tmp_path, spoil, message
):
    path = tmp_path / "batch"
    write_batch(path, 3, GROUPS)
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(ValueError, match=rf"^[^\n]*{message}[^\n]*$"):
        read_batch(path, 4)
