"""What several ranks do together, over NCCL on GPUs or over gloo on the CPU: they train, one fails, one sends weights.

NCCL refuses two ranks that have one GPU and one host. If there are fewer GPUs than ranks, each rank calls itself
another host (NCCL_HOSTID), and they exchange through sockets. NCCL's sources allow that, and no page of NCCL promises
it. The bodies are the same on both devices, so the tests on the CPU run them.
"""

import contextlib
import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from cpu_transports import patch_nccl
from ranks import run_ranks
from real_job import launch, torchrun
from tiny_policy import random_sequences

from asyncrl.cluster.processes import end_by, end_if_stuck
from asyncrl.config import Config, OptimOptions
from asyncrl.trainer.policy import load_policy
from asyncrl.trainer.splitting import distribute
from asyncrl.weights.nccl import NcclTransport
from asyncrl.weights.transport import ParameterSpec, layout

ON_ONE_GPU = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NET": "Socket",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MAX_CTAS": "4",
}
"""Variables of NCCL for ranks that share a GPU: sockets of the loopback, and few blocks of threads for a kernel."""
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
LIMIT_S = 240
"""Longest time of a test's ranks, seconds. A rank that hangs is then killed."""
STEPS = 3


def device_of(kind: str, rank: int, num_ranks: int) -> torch.device:
    """Return the device of a rank, and set the variables of NCCL. Call it before a process group is made."""
    if kind == "cpu":
        return torch.device("cpu")
    index = rank
    if torch.cuda.device_count() < num_ranks:
        index = 0
        os.environ |= ON_ONE_GPU | {"NCCL_HOSTID": f"host{rank}"}
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


# Training


def train_steps(policy, rank: int, num_ranks: int) -> list[tuple[float, float]]:
    """Train on random sequences. Return the loss and the gradient's norm of each step."""
    numbers = []
    for step in range(STEPS):
        sequences = random_sequences(32, step, 64, 256)
        layout_and_split = policy.module.layout, policy.split_over_ranks
        share = distribute([sequences], num_ranks, 2048, *layout_and_split)[rank]
        metrics = policy.train_step(share, policy_version=12)
        numbers.append((metrics["loss/total"], metrics["loss/grad_norm"]))
    return numbers


def train_on_ranks(rank, num_ranks, kind, model, folder, all_replicas) -> None:
    """Body of a rank: train a new policy with each of these numbers of replicas. Rank 0 writes what came of it."""
    torch.set_num_threads(1)
    device = device_of(kind, rank, num_ranks)
    store = dist.FileStore(os.path.join(folder, f"store_{num_ranks}"), num_ranks)
    dist.init_process_group(BACKENDS[kind], store=store, rank=rank, world_size=num_ranks)
    trained = {}
    for replicas in all_replicas:
        options = {"replicas": replicas, "lr": {"cpu": 1e-3, "cuda": 1e-5}[kind], "compile": False}
        fixed = {"model": model, "algo": "tis", "optim": OptimOptions(warmup_steps=0)}
        policy = load_policy(Config(**fixed, **options), model, device)
        numbers = train_steps(policy, rank, num_ranks)
        weights = [float(w.double().abs().sum()) for _, w in policy.named_full_parameters()]
        trained[str(replicas)] = {"steps": numbers, "weights": sum(weights)}
        del policy
    if rank == 0:
        Path(folder, f"{num_ranks}.json").write_text(json.dumps(trained))
    dist.destroy_process_group()


def check_two_ranks_train_as_one(kind: str, model: str, folder: Path, relative: float) -> None:
    """FSDP2 (one replica) and HSDP (two) on two ranks make the steps of one rank, up to a relative difference."""
    trained = {}
    for num_ranks, all_replicas in ((1, [1]), (2, [1, 2])):
        args = (num_ranks, kind, model, str(folder), all_replicas)
        assert run_ranks(train_on_ranks, num_ranks, *args, limit_s=LIMIT_S) == [0] * num_ranks
        trained[num_ranks] = json.loads((folder / f"{num_ranks}.json").read_text())
    expected = trained[1]["1"]
    assert all(norm > 0 for _, norm in expected["steps"])
    for numbers in trained[2].values():
        for mine, alone in zip(numbers["steps"], expected["steps"], strict=True):
            assert mine == pytest.approx(alone, rel=relative, abs=relative / 10)
        assert numbers["weights"] == pytest.approx(expected["weights"], rel=relative / 10)


# A rank that fails


def fail_after_a_step(kind: str, model: str) -> None:
    """Body of a rank that torchrun starts: the last one fails after a step, and others wait for it in a collective."""
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    end_if_stuck()
    torch.set_num_threads(1)
    device = device_of(kind, rank, num_ranks)
    dist.init_process_group(BACKENDS[kind])
    config = Config(model=model, algo="tis", lr=1e-5, compile=False)
    policy = load_policy(config, model, device)
    train_steps(policy, rank, num_ranks)
    if rank == num_ranks - 1:
        print(f"fails at {time.time()}", flush=True)
        end_by(RuntimeError("this rank is to fail"), lambda: None)
    with contextlib.suppress(RuntimeError):  # gloo notices the lost rank
        train_steps(policy, rank, num_ranks)
    time.sleep(LIMIT_S)


def check_ranks_are_gone_after_a_failure(
    kind: str, model: str, folder: Path, within_s: float
) -> None:
    """torchrun ends soon after one of two ranks has failed, though the other one waits for it."""
    gpus = "" if kind == "cpu" else os.environ.get("CUDA_VISIBLE_DEVICES", "0,1")
    job = launch([*torchrun(2), __file__, kind, model], folder / "run", gpus=gpus)
    status = job.wait(LIMIT_S)
    ended = time.time()
    output = job.output()
    assert status == 1, output[-3000:]
    assert "error: this rank is to fail" in output
    assert ended - float(re.search(r"fails at ([\d.]+)", output)[1]) < within_s


# Weights to two engines

NUM_VERSIONS = 3
SIZES = {
    "cpu": [3 << 22, 1 << 22, 5, 1 << 23, 7, 1],
    "cuda": [(1 << 24) + 4096 * i for i in range(40)],
}
"""Numbers of weights: some chunks, and on a GPU 1.4 GB in bfloat16."""
CPU_CHUNK_BYTES = 1 << 24
"""More than the buffers of a socket hold, so that a sender waits for an engine that does not receive."""


def specs_of(kind: str) -> list[ParameterSpec]:
    return [ParameterSpec(f"w{i}", torch.bfloat16, (n,)) for i, n in enumerate(SIZES[kind])]


def value_of(spec: ParameterSpec, version: int, device: torch.device) -> torch.Tensor:
    """The weights of a version, which both sides can make."""
    generator = torch.Generator(device).manual_seed(1000 * version + int(spec.name[1:]))
    return torch.randn(spec.shape, generator=generator, device=device).to(spec.dtype)


def exchange_weights(rank: int, kind: str, folder: str) -> None:
    """Body of three processes: the first sends versions to the two others, and kills the last one while it sends."""
    torch.set_num_threads(1)
    if kind == "cpu":
        patch_nccl(pytest.MonkeyPatch(), CPU_CHUNK_BYTES)
    device = device_of(kind, rank, 3)
    store = dist.FileStore(os.path.join(folder, "store"), 3)
    if rank == 0:
        send_versions(store, kind, device)
    else:
        receive_versions(store, rank - 1, kind, device)


def receive_versions(store: dist.Store, worker: int, kind: str, device: torch.device) -> None:
    """vLLM's end: receive each version that the store announces, and report it. The process is killed in the end."""
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
    from vllm.distributed.utils import StatelessProcessGroup
    from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_consumer

    info = json.loads(store.get(f"info {worker}"))
    place = [info[name] for name in ("master_address", "master_port", "rank_offset", "world_size")]
    link = PyNcclCommunicator(StatelessProcessGroup.create(*place), device=device)
    store.set(f"up {worker}", str(os.getpid()))
    specs = specs_of(kind)
    shapes = [(spec.name, (spec.shape, spec.dtype)) for spec in specs]
    for version in range(NUM_VERSIONS + 1):
        if store.get(f"version {version} of {worker}") == b"hang":
            time.sleep(LIMIT_S)
        names = []

        def compare(named, version=version, names=names):
            for name, tensor in named:
                expected = value_of(specs[len(names)], version, device)
                assert name == specs[len(names)].name and tensor.equal(expected), name
                names.append(name)

        packed_nccl_broadcast_consumer(
            iter(shapes),
            link,
            0,
            compare,
            buffer_size_bytes=info["packed_buffer_size_bytes"],
            num_buffers=info["packed_num_buffers"],
            device=device,
        )
        assert len(names) == len(specs)
        store.set(f"has {version} {worker}", "")


def send_versions(store: dist.Store, kind: str, device: torch.device) -> None:
    """The trainer's end: NcclTransport as it is in a run."""
    specs = specs_of(kind)
    transport = NcclTransport(specs, device, 1, 60.0)
    for worker in range(2):
        store.set(f"info {worker}", json.dumps(transport.init_info(worker)))
    pids = [int(store.get(f"up {worker}")) for worker in range(2)]
    for version in range(NUM_VERSIONS):
        staged = stage(transport, specs, version, device)
        for worker in range(2):
            transport.acquire(staged)
            store.set(f"version {version} of {worker}", "receive")
            transport.send(worker, staged)
        for worker in range(2):
            store.get(f"has {version} {worker}")
            transport.release(staged)
        transport.check()
    staged = stage(transport, specs, NUM_VERSIONS, device)
    store.set(f"version {NUM_VERSIONS} of 1", "hang")
    transport.send(1, staged)
    time.sleep(2)  # its first chunk is on the way
    os.kill(pids[1], signal.SIGKILL)
    start = time.monotonic()
    transport.disconnect(1)
    store.set(f"version {NUM_VERSIONS} of 0", "receive")
    transport.send(0, staged)
    store.get(f"has {NUM_VERSIONS} 0")
    transport.check()
    transport.close()
    print(f"weights, and the end, {time.monotonic() - start:.1f} s after a kill", flush=True)
    assert time.monotonic() - start < 60
    sys.stdout.flush()
    os._exit(0)  # as a rank of a run ends; NCCL's threads can wait for the dead engine


def stage(transport, specs, version, device):
    """Stage a version, as a trainer does, and make it readable."""
    staged = transport.stage(version, ((s.name, value_of(s, version, device)) for s in specs))
    transport.make_readable(staged)
    assert layout(specs) == staged.messages[0]
    return staged


def check_two_engines_get_weights_and_one_can_die(kind: str, folder: Path) -> None:
    """Both have each version. If one is killed while it is sent to, the other one has the next version."""
    statuses = run_ranks(exchange_weights, 3, kind, str(folder), limit_s=LIMIT_S)
    assert statuses == [0, 0, -signal.SIGKILL]


if __name__ == "__main__":
    fail_after_a_step(*sys.argv[1:])
