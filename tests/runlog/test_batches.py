import dataclasses
import re

import numpy as np
import pytest
from trajectories import make_trajectory

from asyncrl.records import Group
from asyncrl.runlog.batches import batch_path, read_batch, weights_sha256, write_batch


def random_batch(num_groups=3, group_size=4, seed=0):
    """Groups whose ids are neither sorted nor adjacent, of trajectories with every field its own."""
    rng = np.random.default_rng(seed)
    return [
        Group(
            group_id,
            tuple(random_trajectory(rng, group_id, member) for member in range(group_size)),
        )
        for group_id in rng.permutation(100)[:num_groups].tolist()
    ]


def random_trajectory(rng, group_id, member):
    versions = rng.integers(0, 1000, size=rng.integers(1, 9)).tolist()
    trajectory = make_trajectory(group_id, member, versions, rng.choice(["stop", "length"]).item())
    return dataclasses.replace(
        trajectory,
        tokens=rng.integers(0, 1 << 40, len(versions) + 1),
        behavior_logprobs=rng.normal(size=len(versions) + 1).astype(np.float32),
        reward=rng.normal(),
        num_turns=int(rng.integers(1, 9)),
        started_at=1.7e9 + rng.random(),
        worker=int(rng.integers(8)),
    )


def fields_of(groups):
    """Every field of every trajectory as (name, type, dtype, bytes or value), group by group."""
    return [
        (
            group.group_id,
            [
                [_exact(f.name, getattr(t, f.name)) for f in dataclasses.fields(t)]
                for t in group.trajectories
            ],
        )
        for group in groups
    ]


def _exact(name, value):
    if isinstance(value, np.ndarray):
        return name, value.dtype, value.shape, value.tobytes()
    return name, type(value), value


def test_what_is_read_is_what_was_written_bit_by_bit_and_in_order(tmp_path):
    groups = random_batch()
    odd = np.array([np.nan, -0.0, np.float32(1e-45), -np.inf, 0.1], dtype=np.float32)
    first = dataclasses.replace(make_trajectory(7, 0, (0, 0, 0, 0)), behavior_logprobs=odd)
    groups.append(Group(7, (first,)))
    path = batch_path(tmp_path, 12)
    write_batch(path, 12, groups)
    assert fields_of(read_batch(path, 12)) == fields_of(groups)
    assert [file.name for file in path.parent.iterdir()] == ["step_000012.msgpack"]


def test_a_batch_that_cannot_be_written_whole_is_not_there(tmp_path):
    path = batch_path(tmp_path, 1)
    path.parent.mkdir()
    path.with_suffix(".tmp").mkdir()  # no file can be opened there
    with pytest.raises(OSError):
        write_batch(path, 1, random_batch())
    assert not path.exists()


def test_a_file_that_is_no_batch_or_another_steps_or_another_versions_is_refused_in_one_line(
    tmp_path,
):
    path = tmp_path / "batch"
    write_batch(path, 3, random_batch())
    with pytest.raises(ValueError, match=r"^[^\n]*is the batch of step 3, not 4[^\n]*$"):
        read_batch(path, 4)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"^[^\n]*is no recorded batch[^\n]*$"):
        read_batch(path, 3)
    path.write_bytes(whole)
    path.write_bytes(b"\x80")  # an empty record
    with pytest.raises(ValueError, match=r"^[^\n]*is no recorded batch[^\n]*$"):
        read_batch(path, 3)
    path.write_bytes(re.sub(b"num_turns", b"num_tunes", whole))
    with pytest.raises(
        ValueError, match=r"^[^\n]*another version of this code[^\n]*`num_turns`[^\n]*$"
    ):
        read_batch(path, 3)


def test_the_fingerprint_follows_the_weights_and_nothing_else(tmp_path):
    (tmp_path / "model-1.safetensors").write_bytes(b"first")
    (tmp_path / "model-2.safetensors").write_bytes(b"second")
    before = weights_sha256(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert weights_sha256(tmp_path) == before
    (tmp_path / "model-2.safetensors").write_bytes(b"Second")
    assert weights_sha256(tmp_path) != before
