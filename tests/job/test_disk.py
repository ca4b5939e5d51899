"""Whether the disk has room for a run's checkpoints, which is asked at its start."""

from types import SimpleNamespace

import pytest

from asyncrl.config import Config
from asyncrl.job.disk import check_room, checkpoint_bytes, num_checkpoints

SIZE = 8 * 10**9
"""Parameters: 32 GB of weights, and 96 GB to continue from."""


@pytest.mark.parametrize(
    ("options", "free_gb", "line"),
    [
        (
            {},
            128,
            "checkpoints: 128 GB each, 128 GB at most, and 128 GB are free in RUNS; --keep",
        ),
        ({}, 127, None),
        ({"save_every": 40}, 256, "checkpoints: 128 GB each, 256 GB at most"),
        ({"save_every": 40}, 255, None),
        ({"save_every": 80}, 128, "checkpoints: 128 GB each, 128 GB at most"),
        # two whole ones, the third beside them, and 32 GB of each of five others
        ({"save_every": 10}, 544, "checkpoints: 128 GB each, 544 GB at most"),
        ({"save_every": 10}, 543, "warning: checkpoints: 128 GB each, 544 GB at most, and 543"),
        ({"save_every": 10}, 255, None),
        ({"save_every": 10, "keep_last": 1}, 256, "checkpoints: 128 GB each, 256 GB at most"),
        ({"save_every": 10, "keep_last": 3}, 511, "warning: checkpoints: 128 GB each, 512 GB"),
        ({"lora_rank": 8}, 32, "checkpoints: 32 GB each, 32 GB at most"),
        ({"lora_rank": 8}, 31, None),
        ({"save": "weights"}, 32, "checkpoints: 32 GB each, 32 GB at most"),
        # the second is written beside the first, and no version is held back in a checkpoint
        (
            {"save": "weights", "dtype": "bfloat16", "publish_delay": 4, "save_every": 10},
            128,
            "checkpoints: 16 GB each, 128 GB at most",
        ),
        ({"save": "weights", "save_every": 10, "keep_last": 1}, 63, None),
        ({"publish_delay": 4}, 256, "checkpoints: 256 GB each, 256 GB at most"),
        ({"publish_delay": 4, "dtype": "bfloat16"}, 192, "checkpoints: 192 GB each"),
    ],
)
def test_checkpoints_are_compared_with_the_disk(options, free_gb, line, tmp_path, monkeypatch):
    """The folder of the runs is not there yet."""
    asked = []
    disk = SimpleNamespace(free=free_gb * 10**9)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: asked.append(folder) or disk)
    runs = str(tmp_path / "new" / "runs")
    config = Config(runs_dir=runs, **options)
    sizes = checkpoint_bytes(config, SIZE, "cpu")
    if line is None:
        with pytest.raises(
            ValueError, match=rf"GB at first.* {free_gb} GB are free in {runs}; mak"
        ):
            check_room(config, sizes, 0)
    else:
        assert check_room(config, sizes, 0).startswith(line.replace("RUNS", runs))
    assert asked == [tmp_path]


def test_a_resumed_run_needs_room_beside_the_checkpoint_that_it_continues_from(monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=130 * 10**9))
    config = Config(save_every=10)
    with pytest.raises(ValueError, match="256 GB at first, as the second is written beside"):
        check_room(config, checkpoint_bytes(config, SIZE, "cpu"), 0)
    assert check_room(config, checkpoint_bytes(config, SIZE, "cpu"), 10).startswith("warning")
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=120 * 10**9))
    with pytest.raises(ValueError, match="128 GB at first, 512 GB at most, and 120 GB are free"):
        check_room(config, checkpoint_bytes(config, SIZE, "cpu"), 10)


@pytest.mark.parametrize(
    ("steps", "save_every", "first_version", "number"),
    [(9, 4, 0, 3), (9, 4, 7, 2), (9, 4, 8, 1), (8, 4, 0, 2), (8, 4, 3, 2), (9, 0, 3, 1)],
)
def test_due_checkpoints_are_counted_from_the_step_that_a_run_continues_from(
    steps, save_every, first_version, number
):
    config = Config(steps=steps, save_every=save_every)
    assert num_checkpoints(config, first_version) == number
    due = [step for step in range(first_version + 1, steps + 1) if config.is_due(step, save_every)]
    assert len(due) == number
