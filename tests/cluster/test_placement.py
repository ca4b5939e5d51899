import pytest

from asyncrl.cluster.placement import place
from asyncrl.config import Config


def devices(placement):
    workers = [
        (w.gpu, w.shared_with_rank, w.cpu_threads, w.gpu_memory_utilization)
        for w in placement.workers
    ]
    return placement.trainer_gpus, workers, placement.transport


@pytest.mark.parametrize(
    ("gpus", "cores", "ranks", "requested", "expected"),
    [
        (0, 2, 1, None, ((None,), [(None, None, 1, 0.0)], "shm")),
        (0, 8, 1, None, ((None,), [(None, None, 4, 0.0)], "shm")),
        (0, 2, 2, 2, ((None, None), [(None, None, 1, 0.0), (None, None, 1, 0.0)], "shm")),
        (1, 16, 1, None, ((0,), [(0, 0, 1, 0.45)], "ipc")),
        (1, 16, 1, 1, ((0,), [(0, 0, 1, 0.45)], "ipc")),
        (2, 16, 1, None, ((0,), [(1, None, 1, 0.9)], "nccl")),
        (4, 16, 1, 2, ((0,), [(1, None, 1, 0.9), (2, None, 1, 0.9)], "nccl")),
        (8, 64, 4, None, ((0, 1, 2, 3), [(i, None, 1, 0.9) for i in (4, 5, 6, 7)], "nccl")),
    ],
)
def test_each_case_has_its_table(gpus, cores, ranks, requested, expected):
    assert devices(place(Config(num_rollout_workers=requested), gpus, cores, ranks)) == expected


@pytest.mark.parametrize(
    ("gpus", "ranks", "requested", "message"),
    [
        (
            1,
            2,
            None,
            r"2 trainer ranks \+ 1 rollout workers × 1 GPUs = 3 GPUs, 1 visible; lower --nproc-per-node",
        ),
        (
            1,
            1,
            2,
            r"1 trainer ranks \+ 2 rollout workers × 1 GPUs = 3 GPUs, 1 visible; .*may share the only GPU",
        ),
        (
            4,
            2,
            3,
            r"2 trainer ranks \+ 3 rollout workers × 1 GPUs = 5 GPUs, 4 visible; .*--num-rollout-workers",
        ),
        (
            4,
            4,
            None,
            r"4 trainer ranks \+ 1 rollout workers × 1 GPUs = 5 GPUs, 4 visible; lower --nproc-per-node",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_the_arithmetic(gpus, ranks, requested, message):
    with pytest.raises(ValueError, match=message):
        place(Config(num_rollout_workers=requested), gpus, 16, ranks)


@pytest.mark.parametrize(
    ("gpus", "ranks", "options", "expected"),
    [
        (4, 2, {"rollout_tp": 2}, [(2, 2)]),
        (8, 4, {"rollout_tp": 2}, [(4, 2), (6, 2)]),
        (8, 2, {"rollout_tp": 4, "num_rollout_workers": 1}, [(2, 4)]),
        (8, 3, {"rollout_tp": 2}, [(3, 2), (5, 2)]),
    ],
)
def test_a_worker_may_have_several_gpus_one_after_the_other(gpus, ranks, options, expected):
    placement = place(Config(**options), gpus, 16, ranks)
    assert [(worker.gpu, worker.num_gpus) for worker in placement.workers] == expected


@pytest.mark.parametrize(
    ("gpus", "ranks", "options", "message"),
    [
        (
            0,
            1,
            {"num_rollout_workers": 1000},
            r"1000 on 16 CPU cores: 1000 / 16 = 62.50 engines per core",
        ),
        (0, 1, {"rollout_tp": 2}, "--rollout-tp 2 splits an engine over GPUs, and none is visible"),
        (
            1,
            1,
            {"rollout_tp": 2},
            r"1 trainer ranks \+ 1 rollout workers × 2 GPUs = 3 GPUs, 1 visible",
        ),
        (
            4,
            3,
            {"rollout_tp": 2},
            r"3 trainer ranks \+ 1 rollout workers × 2 GPUs = 5 GPUs, 4 visible",
        ),
        (
            8,
            4,
            {"rollout_tp": 2, "num_rollout_workers": 3},
            r"= 10 GPUs, 8 visible; lower .*--num-rollout-workers",
        ),
        (0, 1, {"colocate": "sleep", "async_ratio": 0}, "--colocate sleep is for one GPU"),
        (4, 2, {"colocate": "sleep", "async_ratio": 0}, "--colocate sleep is for one GPU"),
    ],
)
def test_many_engines_a_split_one_and_a_sleeping_one_need_what_they_need(
    gpus, ranks, options, message
):
    with pytest.raises(ValueError, match=message):
        place(Config(**options), gpus, 16, ranks)


@pytest.mark.parametrize(
    ("gpus", "has_nccl", "wanted", "chosen"),
    [
        (0, True, "auto", "shm"),
        (1, True, "auto", "ipc"),
        (1, True, "shm", "shm"),
        (4, True, "auto", "nccl"),
        (4, False, "auto", "shm"),
        (4, True, "shm", "shm"),
        (0, True, "nccl", "through host memory; use shm"),
        (0, True, "ipc", "through host memory; use shm"),
        (1, True, "nccl", "share one GPU, which NCCL refuses; use ipc or shm"),
        (4, True, "ipc", "separate GPUs, between which there is no CUDA IPC; use nccl or shm"),
        (4, False, "nccl", "this torch has no NCCL; use shm"),
    ],
)
def test_weights_go_the_fastest_way_there_is_and_an_impossible_one_is_refused(
    gpus, has_nccl, wanted, chosen
):
    ranks = min(2, gpus) if gpus > 1 else 1
    if chosen in ("shm", "ipc", "nccl"):
        assert place(Config(weight_sync=wanted), gpus, 16, ranks, has_nccl).transport == chosen
    else:
        with pytest.raises(
            ValueError, match=f"--weight-sync {wanted} cannot work here: .*{chosen}"
        ):
            place(Config(weight_sync=wanted), gpus, 16, ranks, has_nccl)


@pytest.mark.parametrize(
    ("gpus", "cores", "ranks", "threads"),
    [(1, 16, 1, 14), (1, 2, 1, 1), (8, 64, 4, 14), (0, 8, 1, 4), (4, 4, 2, 1)],
)
def test_trainer_ranks_get_the_cores_that_workers_leave(gpus, cores, ranks, threads):
    assert place(Config(), gpus, cores, ranks).trainer_threads == threads


def test_the_printed_table_names_every_process_and_its_device():
    table = place(
        Config(gpu_memory_utilization=0.35), num_gpus=1, num_cores=8, num_trainer_ranks=1
    ).table()
    assert "trainer rank 0" in table
    assert "gpu 0, shared with trainer rank 0, 35.0% of its memory" in table
    assert "weights by ipc" in table
    assert (
        "gpus 2 to 3"
        in place(Config(rollout_tp=2), num_gpus=4, num_cores=8, num_trainer_ranks=2).table()
    )


def test_a_machine_that_joined_has_all_gpus_for_its_workers_and_weights_in_its_host_memory():
    placed = place(Config(rollout_tp=2), 8, 64, 0)
    assert [worker.gpu for worker in placed.workers] == [0, 2, 4, 6] and placed.transport == "shm"
    alone = place(Config(), 0, 4, 0)
    assert [worker.cpu_threads for worker in alone.workers] == [4] and alone.transport == "shm"
    with pytest.raises(
        ValueError, match=r"1 rollout workers × 4 GPUs = 4 GPUs, 2 visible; .*--rollout-tp"
    ):
        place(Config(rollout_tp=4), 2, 64, 0)


def test_a_run_without_workers_of_its_own_trains_on_all_gpus_and_its_weights_are_pulled():
    config = Config(num_rollout_workers=0, listen="host:1", rollout_tp=2, max_response_tokens=2048)
    assert devices(place(config, 0, 4, 2)) == ((None, None), [], "pull")
    assert devices(place(config, 1, 4, 1)) == ((0,), [], "pull")
    placed = place(config, 4, 16, 4)
    assert devices(placed) == ((0, 1, 2, 3), [], "pull") and placed.trainer_threads == 4
    assert placed.table().startswith(
        "placement (no rollout worker here: machines that join sample):\n  trainer rank 0"
    )
    with pytest.raises(
        ValueError, match=r"9 trainer ranks \+ 0 rollout workers .* = 9 GPUs, 8 visible"
    ):
        place(config, 8, 64, 9)
