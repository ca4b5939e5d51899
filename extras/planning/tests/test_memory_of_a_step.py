"""What a step needs on a GPU, counted on fake tensors in the shapes of Qwen3, beside the plan's arithmetic.

The model, FSDP's sharding over four ranks of a fake group and AdamW are the real ones. Tensors have sizes and no
values, on the CPU; its kernels of attention are not used, but the sizes of varlen_attn's.
"""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from live_bytes import LiveBytes
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM

import asyncrl.trainer.logprobs
from algos.sampling import Sampling
from asyncrl.config import Config
from asyncrl.trainer.logprobs import TokenLogprobs
from asyncrl.trainer.model import embedding_apart, recompute_layers, shard
from extras.planning.memory import saved_bytes_per_token, step_items, total
from extras.planning.shape import read_shape
from scripts.qwen3_shapes import qwen3_config

SIZES = ("0.6b", "1.7b", "8b")
NUM_RANKS = 4


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    found = {}
    for size in SIZES:
        folder = tmp_path_factory.mktemp(size)
        qwen3_config(size).save_pretrained(folder)
        found[size] = read_shape(str(folder))
    return found


# A layer


def saved_by_layers(size: str, num_layers: int, length: int, recompute: bool) -> int:
    """Bytes of all that autograd keeps of a forward pass in bfloat16, weights excepted."""
    with torch.device("meta"):
        config = qwen3_config(
            size, num_hidden_layers=num_layers, layer_types=["full_attention"] * num_layers
        )
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="varlen"
        ).eval()
    if recompute:
        recompute_layers(model, list(model.model.layers))
    weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            kept[storage._cdata] = storage  # held, so that its address is not used again
        return tensor

    bounds = torch.tensor([0, length], dtype=torch.int32, device="meta")
    seen = {
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": length,
        "max_length_k": length,
    }
    ids = torch.zeros(1, length, dtype=torch.int64, device="meta")
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = model.model(ids, position_ids=ids, use_cache=False, **seen)[0]
    assert hidden.requires_grad
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("size", SIZES)
def test_the_plan_knows_what_a_layer_keeps_of_a_token(size, shapes):
    length = 1000
    two, four = (saved_by_layers(size, num, length, recompute=False) for num in (2, 4))
    kept = (four - two) / 2 / length
    print(
        f"{size}: a layer keeps {kept:.0f} B of a token, planned {saved_bytes_per_token(shapes[size])}"
    )
    assert saved_bytes_per_token(shapes[size]) == pytest.approx(kept, rel=0.001)


@pytest.mark.parametrize("size", SIZES)
def test_a_layer_that_is_recomputed_keeps_its_input(size, shapes):
    length = 1000
    two, four = (saved_by_layers(size, num, length, recompute=True) for num in (2, 4))
    assert (four - two) / 2 / length == pytest.approx(2 * shapes[size].hidden_size, rel=0.01)


# The head


class OnlyHead(torch.nn.Module):
    """A causal LM whose layers have computed already."""

    config = SimpleNamespace(_attn_implementation="sdpa")

    def __init__(self, head, hidden):
        super().__init__()
        self.get_output_embeddings = lambda: head
        self.base_model = lambda **_: SimpleNamespace(last_hidden_state=hidden)


@pytest.mark.parametrize(
    ("sampling", "copies"),
    [(Sampling(0.7), 3), (Sampling(0.7, 0.9), 6), (Sampling(0.7, 1.0, 20, 0.1), 4)],
)
@pytest.mark.parametrize("hidden_size", [1024, 4096])
def test_the_head_takes_what_its_docstring_says_beside_its_weight(hidden_size, sampling, copies):
    vocabulary, chunk, rows = 151_936, 1024, 4096
    with FakeTensorMode():
        head = torch.nn.Linear(hidden_size, vocabulary, bias=False, dtype=torch.bfloat16)
        hidden = torch.randn(1, rows, hidden_size, dtype=torch.bfloat16, requires_grad=True)
        module = TokenLogprobs(OnlyHead(head, hidden), chunk)
        flat = torch.zeros(rows, dtype=torch.int64)
        with LiveBytes() as live:
            module(flat[None], flat[None], flat, flat, sampling)[0].sum().backward()
    of_head, of_logits, small = (
        2 * hidden_size * vocabulary,
        4 * chunk * vocabulary,
        4 * hidden.nbytes,
    )
    most = max(copies * of_logits, 2 * of_logits + of_head) + 2 * of_head
    assert 0.85 * most < live.peak <= most + small


# A step


@pytest.fixture(scope="module")
def fake_ranks():
    """A process group in which nobody else is."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=NUM_RANKS)
    yield
    dist.destroy_process_group()


def peaks_of_step(
    model_config, tokens: int, config: Config, monkeypatch
) -> tuple[dict[str, int], int]:
    """Most bytes in each part of a step with two micro-batches beyond what a rank holds between steps, and that."""
    longest, mesh = tokens // 8, init_device_mesh("cpu", (NUM_RANKS,))
    with FakeTensorMode(), LiveBytes() as live:
        bounds = torch.arange(0, tokens + 1, longest, dtype=torch.int32)
        seen = {
            "cu_seq_lens_q": bounds,
            "cu_seq_lens_k": bounds,
            "max_length_q": longest,
            "max_length_k": longest,
        }
        monkeypatch.setattr(asyncrl.trainer.logprobs, "attention_inputs", lambda *_: seen)
        model = AutoModelForCausalLM.from_config(
            model_config, dtype=torch.float32, attn_implementation="varlen", trust_remote_code=False
        ).eval()
        layers = list(model.model.layers)
        if "activations" in config.save_memory:
            recompute_layers(model, layers)
        module = TokenLogprobs(model)
        shard([*layers, *embedding_apart(model), module], mesh, torch.bfloat16, False)
        optimizer = torch.optim.AdamW(module.parameters(), fused=True)
        flat, peaks = torch.zeros(tokens, dtype=torch.int64), {}

        def enter(part: str) -> None:
            peaks[part], live.peak = live.peak, live.now

        for _step in range(2):
            for _microbatch in range(2):
                enter("between")
                logprobs = module(
                    flat[None], flat[None], flat, flat, Sampling(config.temperature, config.top_p)
                )[0]
                enter("forward")
                logprobs.sum().backward()
                del logprobs
                enter("backward")
            optimizer.step()
            optimizer.zero_grad()
            enter("optimizer")
    return {part: peaks[part] - live.now for part in ("forward", "backward", "optimizer")}, live.now


@pytest.mark.parametrize("options", [{}, {"save_memory": ("activations",)}])
@pytest.mark.parametrize(
    ("size", "num_layers"),
    [
        *((size, 6) for size in SIZES[::2]),
        *(pytest.param(*of, marks=pytest.mark.study) for of in (("1.7b", 6), ("8b", 36))),
    ],
)
def test_the_peak_of_a_step_is_that_of_the_plan(
    size, num_layers, options, tmp_path, fake_ranks, monkeypatch
):
    config = Config(
        max_tokens_per_microbatch=16384, max_prompt_tokens=512, max_response_tokens=1536, **options
    )
    model_config = qwen3_config(
        size, num_hidden_layers=num_layers, layer_types=["full_attention"] * num_layers
    )
    found, resident = peaks_of_step(model_config, 16384, config, monkeypatch)
    model_config.save_pretrained(tmp_path)
    shape = read_shape(str(tmp_path))
    planned = total(step_items(config, shape, NUM_RANKS, NUM_RANKS))
    parts = ", ".join(f"{part} {peak / 1e9:.2f}" for part, peak in found.items())
    of = f"{size}, {num_layers} layers, {options}"
    print(
        f"{of}: between steps {resident / 1e9:.2f} GB; in one {parts}; planned {planned / 1e9:.2f}"
    )
    assert resident == pytest.approx(12 * shape.num_parameters / NUM_RANKS, rel=0.01)
    assert planned == pytest.approx(max(found.values()), rel=0.05)
