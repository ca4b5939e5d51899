"""The engine's end of shm.py, in vLLM's engine process. The import of this module registers it with vLLM as `shm`.

It imports vllm, so only asyncrl/engine/engine_extension.py imports it.
"""

import logging
from dataclasses import dataclass

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from asyncrl.weights.shm import SharedBuffer
from asyncrl.weights.transport import specs_of


@dataclass
class ShmInitInfo(WeightTransferInitInfo):
    """Paths of the trainer's two host buffers, and the layout of parameters in them."""

    paths: list[str]
    """One file per buffer, /proc/PID/fd/N of the trainer."""
    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


@dataclass
class ShmUpdateInfo(WeightTransferUpdateInfo):
    """The buffer to read, and the version that it must have."""

    buffer: int
    version: int


class ShmWeightTransferEngine(WeightTransferEngine[ShmInitInfo, ShmUpdateInfo]):
    """Loads weights from the trainer's shared memory, without a copy.

    Some kernels repack weights, so it uses vLLM's layer-wise reload.
    """

    init_info_cls = ShmInitInfo
    update_info_cls = ShmUpdateInfo

    def init_transfer_engine(self, init_info: ShmInitInfo) -> None:
        specs = specs_of(init_info.names, init_info.dtype_names, init_info.shapes)
        on_gpu = self.device.type == "cuda"
        self._buffers = [SharedBuffer(path, specs, on_gpu) for path in init_info.paths]

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        if self.device.type == "cpu":
            self._forget_expert_kernels()
        initialize_layerwise_reload(self.model)

    def _forget_expert_kernels(self) -> None:
        """Make each layer of experts set up its kernel again when its weights are loaded.

        On the CPU the set-up packs the weights. vLLM packs only the first version, so later ones would be misread.
        """
        for module in self.model.modules():
            method = getattr(module, "quant_method", None)
            if isinstance(method, FusedMoEMethodBase):
                method.moe_kernel = None

    def receive_weights(self, update_info: ShmUpdateInfo) -> None:
        buffer = self._buffers[update_info.buffer]
        buffer.check(update_info.version)
        loaded = self.model.load_weights(buffer.parameters)
        buffer.check(update_info.version)  # the trainer has not written meanwhile
        by_name = dict(self.model.named_parameters(remove_duplicate=False))
        loaded_parameters = {id(by_name[name]) for name in loaded & by_name.keys()}
        missing = {
            name for name, parameter in by_name.items() if id(parameter) not in loaded_parameters
        }
        # vLLM never loads a head that is tied to the embedding
        if missing and not (
            self.model_config.hf_config.tie_word_embeddings and missing == {"lm_head.weight"}
        ):
            raise RuntimeError(
                f"version {update_info.version} brought no weights for {sorted(missing)}"
            )

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        self._refresh_tied_head()

    def _refresh_tied_head(self) -> None:
        """Repack a head that is tied to the embedding.

        On the CPU a linear layer uses a packed copy of its weight. The reload repacks loaded layers only. A tied head
        is not loaded, and would keep the weights of the first version.
        """
        for module in self.model.modules():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)

    def shutdown(self) -> None:
        self._buffers = []


# It warns at every update of layers without weights. receive_weights checks that no weight is missing.
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)
WeightTransferEngineFactory.register_engine("shm", ShmWeightTransferEngine)
