"""Shards a model over all ranks (FSDP2). On one rank that computes in float32 the model stays plain.

FSDP would only copy there: each weight to gather it, and each gradient to reduce it.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor


def trainer_mesh(replicas: int, device: torch.device) -> DeviceMesh:
    """Return the mesh of all ranks: [ranks], or with HSDP [replicas, ranks of one]; collective.

    Numbers of ranks rise node by node (torchrun). So with a replica a node, weights are gathered within nodes only.
    """
    num_ranks = dist.get_world_size()
    if replicas == 1:
        return init_device_mesh(device.type, (num_ranks,))
    shape = (replicas, num_ranks // replicas)
    return init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))


def needs_sharding(mesh: DeviceMesh, dtype: torch.dtype, offload: bool) -> bool:
    """Return whether FSDP has something to do: to share, to cast to the dtype of computing, or to offload."""
    return mesh.size() > 1 or dtype != torch.float32 or offload


def shard(
    modules: list[nn.Module], mesh: DeviceMesh, dtype: torch.dtype | None, offload: bool
) -> None:
    """Shard each module's parameters. It computes in `dtype` (None keeps theirs) and reduces gradients in float32.

    `offload` keeps shards, gradients and the optimizer's state in host memory, and the optimizer steps there.
    """
    mixed = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    offloaded = (
        CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if offload else OffloadPolicy()
    )
    for module in modules:
        fully_shard(module, mesh=mesh, mp_policy=mixed, offload_policy=offloaded)


def set_exchange(module: nn.Module, save_memory: tuple[str, ...], is_last: bool) -> None:
    """Choose the gradients that FSDP exchanges and the weights that it frees after the next micro-batch.

    `is_last`: it is the update's last, after which all weights are freed. The optimizer then changes the shards.
    """
    if not isinstance(module, FSDPModule):
        return
    # Replicas sum gradients once an update. Ranks of one replica sum them each time, to keep shards only.
    module.set_requires_all_reduce(is_last)
    if "layers" not in save_memory:
        module.set_reshard_after_backward(is_last)
    module.set_reshard_after_backward(is_last or "head" in save_memory, recurse=False)
    if "head" not in save_memory:
        # Nothing hides the root's exchange (embedding and head), so it happens once an update.
        module.set_requires_gradient_sync(is_last, recurse=False)


def free_gathered_weights(module: nn.Module) -> None:
    """Make each FSDP module of a model keep only its shards."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def gather(tensor: Tensor) -> Tensor:
    """Return a tensor whole; collective if ranks have shards of it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def own_shard(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor, or the whole tensor if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
