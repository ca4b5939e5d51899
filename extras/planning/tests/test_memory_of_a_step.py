"""What a step needs on a GPU, counted on fake tensors in the shapes of Qwen3, beside the plan's arithmetic.

The model, FSDP's sharding over four ranks of a fake group and AdamW are the real ones. Tensors have sizes and no
values, on the CPU; its kernels of attention are not used, but the sizes of varlen_attn's.
"""

import functools

import dense_varlen  # noqa: F401  gives varlen_attn a kernel for the CPU
import pytest
import torch
import torch.distributed as dist
from qwen3_models import shape_of
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from asyncrl.config import Config
from asyncrl.trainer.logprobs import TokenLogprobs
from asyncrl.trainer.model import compile_layers, embedding_apart, recompute_layers
from asyncrl.trainer.sampling import Sampling
from asyncrl.trainer.sharding import set_exchange, shard
from extras.planning.memory import Sharing, saved_bytes_per_token, step_items, total
from extras.planning.shape import read_shape
from scripts.qwen3_shapes import qwen3_config

NUM_RANKS, NUM_TOKENS, FEW_TOKENS = 4, 16384, 64
USUAL = {
    "max_prompt_tokens": 512,
    "max_response_tokens": 1536,
    "groups_per_step": 16,
    "group_size": 4,
    "max_tokens_per_microbatch": NUM_TOKENS,
    "compile": False,
}
RECOMPUTED = {"save_memory": ("layers", "head", "activations")}
FEW_SEQUENCES = {"minibatches": 2, "max_tokens_per_microbatch": 1 << 20}
"""A rank has eight sequences of each update, less than its budget."""


@pytest.fixture(scope="module")
def fake_ranks():
    """A mesh of ranks, of which nobody else is there."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=NUM_RANKS)
    yield init_device_mesh("cpu", (NUM_RANKS,))
    dist.destroy_process_group()


def bounds_of(num_tokens: int, length: int) -> dict:
    """Bounds of sequences of one length, as attention takes them."""
    bounds = torch.arange(0, num_tokens + 1, length, dtype=torch.int32)
    names = ("cu_seq_lens_q", "cu_seq_lens_k")
    return dict.fromkeys(names, bounds) | {"max_length_q": length, "max_length_k": length}


def config_of(size: str, num_layers: int, **changes):
    """Return transformers' config of a Qwen3 with so many layers."""
    layers = {"num_hidden_layers": num_layers, "layer_types": ["full_attention"] * num_layers}
    return qwen3_config(size, **layers, **changes)


def sharded(model_config, config: Config, mesh) -> TokenLogprobs:
    """The model as a rank has it."""
    model = AutoModelForCausalLM.from_config(
        model_config, dtype=torch.float32, attn_implementation="varlen"
    ).eval()
    layers = list(model.model.layers)
    if "activations" in config.save_memory:
        recompute_layers(layers)
    module = TokenLogprobs(model)
    parts = [*layers, *embedding_apart(config, model), module]
    shard(parts, mesh, torch.bfloat16, False)
    if "layers" not in config.save_memory:
        module.set_reshard_after_forward(False)
    return module


def make_pass(module: TokenLogprobs, config: Config, is_last: bool) -> None:
    """Make a forward and backward pass of a micro-batch, as Policy does."""
    set_exchange(module, config.save_memory, is_last)
    sampling = Sampling(config.temperature, config.top_p, config.top_k, config.min_p)
    flat = torch.zeros(NUM_TOKENS, dtype=torch.int64)
    eight_sequences = bounds_of(NUM_TOKENS, NUM_TOKENS // 8)
    scored = module(flat[None], flat[None], flat, flat, sampling, eight_sequences)
    scored[0].sum().backward()


def count_step(model_config, config: Config, mesh) -> tuple[int, int]:
    """Return bytes that a rank holds between steps, and the most beyond them in one of two micro-batches."""
    with FakeTensorMode():
        module = sharded(model_config, config, mesh)
        optimizer = torch.optim.AdamW(module.parameters(), fused=True)
        for parameter in module.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        memory = MemTracker()
        memory.track_external(module, optimizer)
        with memory:
            resident = num_bytes(memory, "current")
            for is_last in (False, True):
                make_pass(module, config, is_last)
                memory.reset_mod_stats()
            optimizer.step()
    return resident, num_bytes(memory, "peak") - resident


def num_bytes(memory: MemTracker, state: str) -> int:
    (of_device,) = memory.get_tracker_snapshot(state).values()
    return of_device["Total"]


@pytest.mark.parametrize(
    ("size", "changes", "numbers", "options", "error"),
    [
        ("8b", {}, (1, 2), {}, 0.05),
        ("8b", {}, (2,), RECOMPUTED | FEW_SEQUENCES, 0.05),
        ("0.6b", {"vocab_size": 49152}, (1,), {}, 0.05),
        pytest.param("0.6b", {}, (2,), {"top_k": 20, "min_p": 0.1}, 0.08, marks=pytest.mark.slow),
        pytest.param("0.6b", {}, (2,), {"top_p": 0.9}, 0.05, marks=pytest.mark.slow),
        pytest.param("8b", {}, (36,), RECOMPUTED, 0.05, marks=pytest.mark.study),
    ],
)
def test_the_peak_of_a_step_and_what_its_layers_keep_are_those_of_the_plan(
    size, changes, numbers, options, error, tmp_path, fake_ranks
):
    """The model has each of these numbers of layers."""
    config = Config(**USUAL | options)
    peaks, planned = [], []
    for num_layers in numbers:
        model_config = config_of(size, num_layers, **changes)
        model_config.save_pretrained(tmp_path)
        shape = read_shape(str(tmp_path))
        resident, peak = count_step(model_config, config, fake_ranks)
        assert resident == pytest.approx(12 * shape.num_parameters / NUM_RANKS, rel=0.01)
        peaks.append(peak)
        planned.append(total(step_items(config, shape, Sharing(NUM_RANKS, NUM_RANKS))))
    assert planned == pytest.approx(peaks, rel=error)
    assert planned[-1] - planned[0] == pytest.approx(peaks[-1] - peaks[0], rel=0.005)


COMPILED_BYTES = 45224
"""Of a token, that a compiled layer of 0.6B keeps, as the slow test counts it."""


def test_the_plan_has_of_compiled_layers_what_was_counted():
    assert saved_bytes_per_token(shape_of("0.6b"), is_compiled=True) == COMPILED_BYTES


@pytest.mark.slow
def test_compiled_layers_keep_of_a_token_what_was_counted(monkeypatch):
    """The real layers in bfloat16, with a CPU kernel of varlen_attn: what autograd keeps of one more layer.

    The partitioner of inductor chooses what is kept. The kernels that it would make next take half a minute.
    """
    compiled = functools.partial(torch.compile, backend="aot_eager_decomp_partition")
    monkeypatch.setattr(torch, "compile", compiled)
    kept = [kept_bytes(config_of("0.6b", number, vocab_size=1000)) for number in (1, 2)]
    assert (kept[1] - kept[0]) / FEW_TOKENS == pytest.approx(COMPILED_BYTES, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("is_compiled", [True, False])
def test_a_mixture_keeps_of_a_token_what_the_plan_has(is_compiled, tmp_path, monkeypatch):
    """The indices of the routing are not in the plan: about 1 %."""
    compiled = functools.partial(torch.compile, backend="aot_eager_decomp_partition")
    monkeypatch.setattr(torch, "compile", compiled)
    mixture_of(1).save_pretrained(tmp_path)
    shape = read_shape(str(tmp_path))
    assert shape.experts_per_token == 8
    kept = [kept_bytes(mixture_of(number), is_compiled) for number in (1, 2)]
    planned = saved_bytes_per_token(shape, is_compiled)
    assert (kept[1] - kept[0]) / FEW_TOKENS == pytest.approx(planned, rel=0.015)


def mixture_of(num_layers: int) -> Qwen3MoeConfig:
    """Return a narrow Qwen3-MoE, of 16 experts."""
    return Qwen3MoeConfig(
        hidden_size=512,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        moe_intermediate_size=192,
        num_experts=16,
        num_experts_per_tok=8,
        num_hidden_layers=num_layers,
        vocab_size=1000,
    )


def kept_bytes(model_config, is_compiled: bool = True) -> int:
    """Return the bytes of activations that layers keep of FEW_TOKENS for their backward pass."""
    model = AutoModelForCausalLM.from_config(
        model_config, dtype=torch.bfloat16, attn_implementation="varlen"
    ).eval()
    if is_compiled:
        compile_layers(list(model.model.layers))
    kept = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor  # which also holds the address
        return tensor

    flat = torch.zeros(1, FEW_TOKENS, dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model.model(flat, position_ids=flat, use_cache=False, **bounds_of(FEW_TOKENS, 16))
    assert output.last_hidden_state.requires_grad
    for parameter in model.parameters():
        kept.pop(parameter.untyped_storage().data_ptr(), None)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
