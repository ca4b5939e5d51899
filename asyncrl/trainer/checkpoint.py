"""What a checkpoint has of the trainer: weights in Hugging Face's format for people, and shards to go on from.

Shards are written by torch.distributed.checkpoint as safetensors, each rank its own, so nothing in them is unpickled,
and any number of ranks reads them. They are written from copies, in the background.
"""

import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Collection, Iterable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from asyncrl.trainer import lora
from asyncrl.trainer.logprobs import TokenLogprobs
from asyncrl.trainer.model import named_persistent_buffers
from asyncrl.trainer.optimizer import OptimizerState

BYTES_BESIDE_WEIGHTS = 32e6
"""Room for tokenizer, config and what else is small."""
SHARD_FILE_BYTES = 1 << 30
"""Size from which a rank's shards go to another file, as each file is put together in memory, bytes."""
VALUE_HEAD = "value_head.weight"
"""Name of the value head's weight, where there is one, which is none of the model's."""
VALUES = "values"
"""Name of what is no tensor, as the bytes of JSON."""


# Weights for people


class WeightWriter:
    """Writes weights, config and tokenizer to a folder, as transformers reads them; may be used by a thread."""

    def __init__(self, model: PreTrainedModel, base_path: str):
        """Read what goes with each checkpoint of a model; the tokenizer is that of the folder `base_path`."""
        with torch.device("meta"):  # its own, as FSDP exchanges the parameters of the trained one while it computes
            self._skeleton = AutoModelForCausalLM.from_config(
                model.config, dtype=torch.float32, trust_remote_code=False
            )
        self.base_path = base_path
        self._buffers = {name: buffer.to("cpu", copy=True) for name, buffer in named_persistent_buffers(model)}
        with tempfile.TemporaryDirectory() as folder:
            AutoTokenizer.from_pretrained(base_path, trust_remote_code=False).save_pretrained(folder)
            self._tokenizer = {path.name: path.read_bytes() for path in Path(folder).iterdir()}

    def write(self, weights: dict[str, Tensor], adapters: dict[str, Tensor], folder: str) -> None:
        """Write full weights by Hugging Face name to `folder`, and full adapters, if any, to `folder`/adapter.

        A value head goes to `folder`/value_head, as engines read all safetensors of a folder as the model's.
        """
        head = {name: weights[name] for name in weights.keys() & {VALUE_HEAD}}
        of_model = {name: weight for name, weight in weights.items() if name not in head}
        self._skeleton.save_pretrained(folder, state_dict=of_model | self._buffers)
        if head:
            os.makedirs(os.path.join(folder, "value_head"))
            save_file(head, os.path.join(folder, "value_head", "value_head.safetensors"))
        for name, content in self._tokenizer.items():
            Path(folder, name).write_bytes(content)
        if adapters:
            lora.write_adapter(os.path.join(folder, "adapter"), adapters, self.base_path)


def differing_names(folder: str, saved: Collection[str]) -> str:
    """What checkpoints with tensors of these names have otherwise than the model's own folder; empty if nothing."""
    read = set()
    for file in Path(folder).glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            read |= set(tensors.keys())
    kinds = {"will lack": sorted(read - set(saved)), "will have, and it lacks,": sorted(set(saved) - read)}
    return "; ".join(
        f"{kind} {', '.join(names[:3])}{f' and {len(names) - 3} more' * (len(names) > 3)}"
        for kind, names in kinds.items()
        if names
    )


def write_folder(writer: WeightWriter, weights: dict[str, Tensor], adapters: dict[str, Tensor], path: str) -> None:
    """Write what `writer` writes to the new folder `path`, under a temporary name that is changed when all is on disk.

    Raises OSError, in one line; after a failure nothing is left.
    """
    partial, folder = path + ".tmp", os.path.dirname(os.path.abspath(path))
    try:
        os.makedirs(folder, exist_ok=True)
        check_space(sum(t.nbytes for t in [*weights.values(), *adapters.values()]), folder)
        if os.path.exists(path):
            raise FileExistsError(f"{path} exists already")
        shutil.rmtree(partial, ignore_errors=True)  # left by a run that was killed here
        writer.write(weights, adapters, partial)
        os.rename(partial, path)
    except (OSError, SafetensorError) as error:
        raise OSError(f"checkpoint {path} was not written: {' '.join(str(error).split())}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # whatever ended it, a signal too


def save_for_people(module: TokenLogprobs, base_path: str, parameters: Iterable[tuple[str, Tensor]], path: str) -> None:
    """Write full weights, and the model's adapters and value head, to the new folder `path` on rank 0; collective.

    Raises OSError on every rank if it cannot be written; then nothing is left under `path`.
    """
    head = () if module.value_head is None else [(VALUE_HEAD, module.value_head.weight.detach().full_tensor())]
    weights = copies_on_rank_0(itertools.chain(parameters, head))
    adapters = copies_on_rank_0((name, p.detach().full_tensor()) for name, p in lora.named_adapters(module.model))
    failure = [None]
    if dist.get_rank() == 0:
        try:
            write_folder(WeightWriter(module.model, base_path), weights, adapters, path)
        except OSError as error:
            failure = [str(error)]
    dist.broadcast_object_list(failure, src=0, device="cpu")
    if failure[0]:
        raise OSError(failure[0])


def copies_on_rank_0(parameters: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Copy parameters to host memory, by name, on rank 0; the other ranks only help to gather them; collective."""
    copies = {}
    for name, tensor in parameters:
        if dist.get_rank() == 0:
            copies[name] = tensor.to("cpu", copy=True)
    return copies


def check_space(num_bytes: int, folder: str, what: str = "float32 weights") -> None:
    """Raise OSError if `folder` has no room for `num_bytes` of `what` and BYTES_BESIDE_WEIGHTS."""
    needed, free = num_bytes + BYTES_BESIDE_WEIGHTS, shutil.disk_usage(folder).free
    if needed > free:
        raise OSError(
            f"needs {needed / 1e9:.3f} GB ({num_bytes / 1e9:.3f} of {what} + {BYTES_BESIDE_WEIGHTS / 1e9:.3f}), "
            f"{free / 1e9:.3f} GB free in {folder}; make room or change --runs-dir"
        )


# Shards to go on from


def check_finite(state: dict[str, Tensor]) -> None:
    """Raise OSError if anything in a training state is infinite or no number: no run can continue from that."""
    for name, tensor in state.items():
        own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if own.is_floating_point() and not own.isfinite().all():
            raise OSError(f"{name} is not finite; the checkpoints before it are kept")


def trained_names(module: TokenLogprobs) -> dict[Tensor, str]:
    """The trained parameters, each with its name: that of Hugging Face, or VALUE_HEAD."""
    named = module.named_parameters()
    return {parameter: name.removeprefix("model.") for name, parameter in named if parameter.requires_grad}


def training_state(optimizer: OptimizerState, num_updates: int) -> dict[str, Tensor]:
    """All that training changes here, by name: trained weights, the optimizer's state, the number of updates, and the
    random numbers of this rank. Live, and sharded as the model is."""
    state = {f"weights.{name}": parameter.detach() for parameter, name in optimizer.names.items()}
    state |= {f"optimizer.{name}": tensor for name, tensor in optimizer.tensors().items()}
    values = json.dumps({"num_updates": num_updates, "optimizer": optimizer.values()})
    state[VALUES] = torch.frombuffer(bytearray(values.encode()), dtype=torch.uint8)
    return state | _random_state()


def _random_state() -> dict[str, Tensor]:
    """State of torch's generators of this rank, by name, [bytes] uint8."""
    on_cpu, on_gpu = _random_names(dist.get_rank())
    state = {on_cpu: torch.get_rng_state()}
    return state | ({on_gpu: torch.cuda.get_rng_state()} if torch.cuda.is_initialized() else {})


def _random_names(rank: int) -> tuple[str, str]:
    return f"random.cpu.{rank}", f"random.cuda.{rank}"


def make_stager(device: torch.device) -> DefaultStager:
    """Copies a training state to host memory, pinned where it comes from a GPU, and the same memory each time."""
    is_gpu = device.type == "cuda"
    return DefaultStager(
        StagingOptions(
            use_pinned_memory=is_gpu, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=is_gpu
        )
    )


def file_numbers(state: dict[str, Tensor], num_ranks: int) -> dict[str, int]:
    """Return for each tensor of a state which of a rank's files it goes to, from 1."""
    total = 0
    numbers = {name: 1 for rank in range(num_ranks) for name in _random_names(rank)}  # rank 0's counts for all
    for name, tensor in state.items():
        numbers[name] = 1 + total // SHARD_FILE_BYTES
        total += tensor.nbytes // num_ranks
    return numbers


def read_shards(state: dict[str, Tensor], folder: str, group: dist.ProcessGroup) -> None:
    """Read what a checkpoint holds, by any number of ranks, into a live state of the same model; collective.

    Random numbers are those of the rank with the same number, if there was one. Raises ValueError if it is of another
    model or optimizer.
    """
    saved = _shapes(folder)
    wanted = {name: tensor for name, tensor in state.items() if name in saved or not name.startswith("random.")}
    unread = {name for name in saved.keys() - wanted.keys() if not name.startswith("random.") and name != VALUES}
    for name in [*wanted, *sorted(unread)]:
        shape = tuple(wanted[name].shape) if name in wanted else None
        if saved.get(name) != shape:
            found = f"{name} of {saved.get(name)}, the run's is {shape}"
            raise ValueError(f"{folder} has {found}: it is of another model, or of other --optim.args")
    _load(wanted, folder, group)


def _shapes(folder: str) -> dict[str, tuple[int, ...]]:
    """Shape of each tensor of the shards in a folder, by name."""
    metadata = dcp.HuggingFaceStorageReader(folder).read_metadata().state_dict_metadata
    return {name: tuple(tensor.size) for name, tensor in metadata.items()}


def _load(state: dict[str, Tensor], folder: str, group: dist.ProcessGroup | None) -> None:
    """Read what a live state names; by this process alone without a group. Raises OSError."""
    try:
        reader = dcp.HuggingFaceStorageReader(folder)
        dcp.load(state, storage_reader=reader, process_group=group, no_dist=group is None)
    except CheckpointException as error:
        raise OSError(reason_of(error)) from None


def restore_training_state(optimizer: OptimizerState, folder: str, group: dist.ProcessGroup) -> int:
    """Have weights, a new optimizer and random numbers go on from the shards in a folder; collective.

    Returns the number of updates that were made. Raises ValueError if the folder is of another model or optimizer, or
    of older code.
    """
    shapes = _shapes(folder)
    if VALUES not in shapes:
        raise ValueError(f"{folder} was written by older code, which saved AdamW alone; resume by that code")
    data = torch.empty(shapes[VALUES], dtype=torch.uint8)
    _load({VALUES: data}, folder, group)
    values = json.loads(data.numpy().tobytes())
    if values["num_updates"]:
        optimizer.make(values["optimizer"])  # in the form that it has for this model and these ranks
    optimizer.set_values(values["optimizer"])
    state = training_state(optimizer, values["num_updates"])
    del state[VALUES]
    read_shards(state, folder, group)
    on_cpu, on_gpu = _random_names(dist.get_rank())
    torch.set_rng_state(state[on_cpu])
    if on_gpu in state:
        torch.cuda.set_rng_state(state[on_gpu])
    return values["num_updates"]


def read_full_weights(folder: str, base: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Full trained weights, and full adapters, from the shards in a folder; by one process. VALUE_HEAD is a weight.

    `base` are the frozen weights, into which adapters are merged; without them all is trained.
    """
    state = {name: torch.empty(shape) for name, shape in _shapes(folder).items() if name.startswith("weights.")}
    _load(state, folder, None)
    weights = {name.removeprefix("weights."): tensor for name, tensor in state.items()}
    if not base:
        return weights, {}
    head = {VALUE_HEAD: weights.pop(VALUE_HEAD)} if VALUE_HEAD in weights else {}
    return {name: lora.merge(name, weight, weights) for name, weight in base.items()} | head, weights


def reason_of(error: CheckpointException | RuntimeError) -> str:
    """Return what went wrong, on the first rank that failed, in one line."""
    rank, cause = "", error
    if isinstance(error, CheckpointException):
        number, (cause, _) = next(iter(error.failures.items()))
        rank = f"rank {number}: "
    kind = "" if isinstance(cause, OSError | SafetensorError) and str(cause) else f"{type(cause).__name__}: "
    return f"{rank}{kind}{' '.join(str(cause).split())}"
