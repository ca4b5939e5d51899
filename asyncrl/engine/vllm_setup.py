"""The set-up of vLLM for a worker.

Functions import vllm, so the import of this module is fast.
"""

import os
import tempfile
from pathlib import Path

from setproctitle import setproctitle

from asyncrl.cluster.gpus import list_gpus
from asyncrl.cluster.placement import WorkerPlacement, WorkerSpec
from asyncrl.cluster.processes import (
    exit_with_parent,
    keep_freed_memory,
    run_on,
    without_torchrun,
)
from asyncrl.cluster.stacks import write_stacks_to
from asyncrl.cluster.streams import keep_printing
from asyncrl.config import Config

CPU_KV_CACHE_BYTES = 1 << 30
ENGINE_STEP_TOKENS = 8192
"""Most tokens that an engine computes in one step, vLLM's default."""


def set_up_process(spec: WorkerSpec) -> None:
    """Make this process a rollout worker. All output of this process and its engine goes to the log."""
    log = os.open(spec.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for standard in (1, 2):
        os.dup2(log, standard)
    keep_printing()
    # Ctrl-C then goes to the trainer only, and the worker's processes are one group to kill
    os.setsid()
    write_stacks_to(Path(spec.log_path).with_name("stacks.txt"))
    exit_with_parent()
    keep_freed_memory()
    setproctitle(f"rollout {spec.placement.worker}")
    # kept for later runs; the run deletes the other folder, with the files that vLLM leaves there
    compiled = os.path.join(tempfile.gettempdir(), f"torchinductor_{os.getuid()}")
    environment = {"TORCHINDUCTOR_CACHE_DIR": compiled}
    environment |= without_torchrun(dict(os.environ)) | worker_environment(spec.placement)
    environment |= {"VLLM_RPC_BASE_PATH": spec.sockets_path, "TMPDIR": spec.sockets_path}
    if spec.config.batch_invariant:
        environment["VLLM_BATCH_INVARIANT"] = "1"
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = spec.sockets_path


def worker_environment(placement: WorkerPlacement) -> dict[str, str]:
    """Return environment variables that vLLM reads at import: device, threads, no telemetry."""
    direct = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    if direct != "*":  # some clients accept "*" only as the whole list
        direct = ",".join(filter(None, [direct, "127.0.0.1", "localhost"]))
    environment = {
        # An agent's or a judge's client reaches this host without a proxy.
        "NO_PROXY": direct,
        "no_proxy": direct,
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        # CUDA IPC handles, from our own trainer over a local pipe
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_PROCESS_NAME_PREFIX": f"engine {placement.worker}",
    }
    if placement.gpu is None:
        # By default every engine of a host would bind to the same cores.
        return environment | {
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(placement.cpu_threads),
            "CUDA_VISIBLE_DEVICES": "",
            # vLLM would compile one small function, 0.8 s
            "TORCHDYNAMO_DISABLE": "1",
        }
    end = placement.gpu + placement.num_gpus
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(end)))
    devices = [name.strip() for name in visible.split(",")]
    if any(name.startswith("GPU-") for name in devices):  # vLLM does not accept a shortened UUID
        devices = [gpu.uuid for gpu in list_gpus(visible)]
    return environment | {"CUDA_VISIBLE_DEVICES": ",".join(devices[placement.gpu : end])}


def start_engine(spec: WorkerSpec):
    """Start vLLM's AsyncLLM, in a running event loop. Its weights are random until the first update."""
    import torch
    from vllm import AsyncEngineArgs
    from vllm.model_executor.models import registry
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = AsyncEngineArgs(**engine_options(spec))
    on_cpu = spec.placement.gpu is None
    if on_cpu:
        # to avoid CUDA, vLLM inspects new model classes in another process. That imports all of vLLM, 9 s
        registry._run_in_subprocess = lambda look: look()
        if arguments.create_model_config().is_hybrid:
            # vLLM caches states of recurrent layers only with chunked prefill; see engine_options
            arguments.enable_prefix_caching = False
    engine_config = arguments.create_engine_config(UsageContext.ENGINE_CONTEXT)
    if on_cpu:
        # On the CPU vLLM has chosen to spawn. A fork does not import vLLM again, 9 s. It inherits the number of torch's
        # threads, because torch may have been imported before the environment was set.
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        torch.set_num_threads(spec.placement.cpu_threads)
    elif torch.distributed.is_initialized():
        # torch.distributed has called CUDA, and vLLM does not notice: a fork could not use a GPU
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    engine = AsyncLLM.from_vllm_config(engine_config, disable_log_stats=True)
    if cores := spec.placement.cores:
        run_on(engine.engine_core.resources.engine_manager.processes[0].pid, cores)
        run_on(os.getpid(), os.sched_getaffinity(0).difference(cores))
    return engine


def engine_options(spec: WorkerSpec) -> dict:
    """Return vLLM's engine arguments for a worker."""
    config, on_cpu = spec.config, spec.placement.gpu is None
    options = {
        "model": spec.model_path,
        "skip_tokenizer_init": True,
        "trust_remote_code": False,
        # the transport brings all weights, so a missing one is noticed at once
        "load_format": "dummy",
        "dtype": config.dtype_on("cpu" if on_cpu else "cuda"),
        "max_model_len": config.max_sequence_tokens,
        "max_num_seqs": config.max_running_requests,
        "seed": config.seed,
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": max(20, config.top_logprobs),  # 20 is the default
        "generation_config": "vllm",
        "disable_log_stats": True,
        "weight_transfer_config": {"backend": spec.transport},
        "worker_extension_cls": "asyncrl.engine.engine_extension.EngineExtension",
    }
    for plugin in config.plugins:
        options |= plugin.engine_options(on_cpu)
    if on_cpu:
        return options | _cpu_options(config)
    return options | {
        "gpu_memory_utilization": spec.placement.gpu_memory_utilization,
        "kv_cache_memory_bytes": spec.placement.kv_cache_bytes,
        # vLLM's default would be 2,048
        "max_num_batched_tokens": max(ENGINE_STEP_TOKENS, config.max_running_requests),
        "tensor_parallel_size": spec.placement.num_gpus,
        "enable_sleep_mode": config.colocate == "sleep",
    }


def _cpu_options(config: Config) -> dict:
    """Return vLLM's engine arguments for a worker without a GPU."""
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    return {
        "kv_cache_memory_bytes": CPU_KV_CACHE_BYTES,
        "enforce_eager": True,
        # Requests share whole blocks of a prompt, and many prompts are shorter than vLLM's default of 128. Its
        # attention takes no fewer than 32.
        "block_size": 32,
        # With chunked prefill a seeded request ends the engine: it rewinds the offset of a generator. A generator on
        # the CPU has no offset.
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(ENGINE_STEP_TOKENS, config.max_sequence_tokens),
        # This is the class, because on the CPU vLLM changes the name "uni" into "mp" to set OpenMP's environment.
        # worker_environment sets it already, and one process fewer is a third faster.
        "distributed_executor_backend": UniProcExecutor,
    }


def sampling_params(
    config: Config, stop_token_ids: list[int], seed: int | None, max_tokens: int, num_responses: int
):
    """Return vLLM's parameters of a request for one or more responses. Without a seed sampling is greedy."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    return SamplingParams(
        n=num_responses,
        temperature=0.0 if seed is None else config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        min_p=config.min_p,
        max_tokens=max_tokens,
        seed=seed,
        logprobs=config.top_logprobs,
        flat_logprobs=True,
        detokenize=False,
        stop_token_ids=stop_token_ids,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,  # they are not shared
    )
