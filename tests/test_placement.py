import pytest

from config import Config
from placement import place


def devices(placement):
    workers = [(w.gpu, w.shared_with_rank, w.cpu_threads, w.gpu_memory_utilization) for w in placement.workers]
    return placement.trainer_gpus, workers, placement.transport


@pytest.mark.parametrize(
    ("gpus", "cores", "ranks", "requested", "expected"),
    [
        (0, 2, 1, None, ((None,), [(None, None, 1, 0.0)], "shm")),
        (0, 8, 1, None, ((None,), [(None, None, 4, 0.0)], "shm")),
        (0, 2, 2, 2, ((None, None), [(None, None, 1, 0.0), (None, None, 1, 0.0)], "shm")),
        (1, 16, 1, None, ((0,), [(0, 0, 1, 0.4)], "ipc")),
        (1, 16, 1, 1, ((0,), [(0, 0, 1, 0.4)], "ipc")),
        (2, 16, 1, None, ((0,), [(1, None, 1, 0.9)], "shm")),
        (4, 16, 1, 2, ((0,), [(1, None, 1, 0.9), (2, None, 1, 0.9)], "shm")),
        (8, 64, 4, None, ((0, 1, 2, 3), [(i, None, 1, 0.9) for i in (4, 5, 6, 7)], "shm")),
    ],
)
def test_each_case_has_its_table(gpus, cores, ranks, requested, expected):
    assert devices(place(Config(num_rollout_workers=requested), gpus, cores, ranks)) == expected


@pytest.mark.parametrize(
    ("gpus", "ranks", "requested", "message"),
    [
        (1, 2, None, "2 trainer ranks on 1 visible GPUs"),
        (1, 1, 2, r"1 trainer rank \+ 2 rollout workers = 3 processes on 1 visible GPU"),
        (4, 2, 3, r"2 trainer ranks \+ 3 rollout workers = 5 GPUs, 4 are visible; lower --num-rollout-workers to 2"),
        (4, 4, None, "leave none for rollout workers: use --nproc-per-node 3 or fewer"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_arithmetic(gpus, ranks, requested, message):
    with pytest.raises(ValueError, match=message):
        place(Config(num_rollout_workers=requested), gpus, 16, ranks)


def test_the_printed_table_names_every_process_and_its_device():
    table = place(Config(gpu_memory_utilization=0.35), num_gpus=1, num_cores=8, num_trainer_ranks=1).table()
    assert "trainer rank 0" in table
    assert "gpu 0, shared with trainer rank 0, 35% of its memory" in table
    assert "weights by ipc" in table
