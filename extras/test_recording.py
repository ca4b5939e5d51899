import dataclasses
import re

import numpy as np
import pytest
from trajectories import make_trajectory

from asyncrl.records import Group
from asyncrl.runlog.manifest import weights_sha256
from extras.recording import batch_path, read_batch, write_batch


def random_batch(num_groups=3, group_size=4):
    """Groups whose ids are neither sorted nor adjacent, of trajectories with every field its own."""
    rng = np.random.default_rng(0)
    return [
        Group(i, tuple(random_trajectory(rng, i, member) for member in range(group_size)))
        for i in rng.permutation(100)[:num_groups].tolist()
    ]


def random_trajectory(rng, group_id, member):
    versions = rng.integers(0, 1000, size=rng.integers(1, 9)).tolist()
    logprobs = rng.normal(size=len(versions) + 1).astype(np.float32)
    logprobs[:1] = rng.choice([np.nan, -0.0, 1e-45, -np.inf, 0.1])
    return dataclasses.replace(
        make_trajectory(group_id, member, versions, rng.choice(["stop", "length"]).item()),
        tokens=rng.integers(0, 1 << 40, len(versions) + 1),
        behavior_logprobs=logprobs,
        reward=rng.normal(),
        num_turns=int(rng.integers(1, 9)),
        started_at=1.7e9 + rng.random(),
        worker=int(rng.integers(8)),
    )


def fields_of(groups):
    """Every field of every trajectory with its type, group by group."""
    return [
        (group.group_id, [list(map(exact, vars(t).items())) for t in group.trajectories])
        for group in groups
    ]


def exact(field):
    name, value = field
    if isinstance(value, np.ndarray):
        return name, value.dtype, value.shape, value.tobytes()
    return name, type(value), value


def test_what_is_read_is_what_was_written_bit_by_bit_and_in_order(tmp_path):
    groups, path = random_batch(), batch_path(tmp_path, 12)
    write_batch(path, 12, groups)
    assert fields_of(read_batch(path, 12)) == fields_of(groups)
    assert [file.name for file in path.parent.iterdir()] == ["step_000012.msgpack"]


def test_a_batch_that_cannot_be_written_whole_is_not_there(tmp_path):
    path = batch_path(tmp_path, 1)
    path.with_suffix(".tmp").mkdir(parents=True)  # no file can be opened there
    with pytest.raises(OSError):
        write_batch(path, 1, random_batch())
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
    write_batch(path, 3, random_batch())
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(ValueError, match=rf"^[^\n]*{message}[^\n]*$"):
        read_batch(path, 4)


def test_the_fingerprint_follows_the_weights_and_nothing_else(tmp_path):
    (tmp_path / "model-1.safetensors").write_bytes(b"first")
    (tmp_path / "model-2.safetensors").write_bytes(b"second")
    before = weights_sha256(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert weights_sha256(tmp_path) == before
    (tmp_path / "model-2.safetensors").write_bytes(b"Second")
    assert weights_sha256(tmp_path) != before
