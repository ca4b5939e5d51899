import pytest
from safetensors import safe_open
from tiny_policy import save_tiny_family, save_tiny_model
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from extras.planning.shape import read_shape


@pytest.mark.parametrize("tied", [True, False])
def test_the_config_says_what_the_loaded_model_has(tmp_path, tied):
    path = save_tiny_model(tmp_path, tied)
    model = AutoModelForCausalLM.from_pretrained(path)
    (tmp_path / "model.safetensors").unlink()  # the config is enough
    shape = read_shape(path)
    assert shape.num_parameters == sum(p.numel() for p in model.parameters())
    assert shape.layer_parameters == sum(p.numel() for p in model.model.layers[0].parameters())
    assert shape.root_parameters == shape.num_parameters - 2 * shape.layer_parameters
    assert shape.largest_parameter == max(p.numel() for p in model.parameters())
    heads = (shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim)
    assert (shape.num_layers, shape.hidden_size, *heads) == (2, 64, 4, 2, 32)
    assert (shape.intermediate_size, shape.vocab_size, shape.needs_mask) == (192, 150, False)


@pytest.mark.parametrize(
    ("family", "options", "width"),
    [
        ("qwen3", {}, 192),
        ("qwen3_moe", {}, 2 * 32),
        (
            "gemma4_text",
            {
                "enable_moe_block": True,
                "num_experts": 4,
                "top_k_experts": 2,
                "moe_intermediate_size": 32,
            },
            2 * 32 + 192,
        ),
        (
            "hunyuan_v1_moe",
            {
                "num_experts_per_tok": [2, 1],
                "moe_intermediate_size": [192] * 2,
                "num_shared_expert": [1] * 2,
            },
            1.5 * 192 + 192,
        ),
    ],
)
def test_families_name_their_experts_by_names_of_their_own(tmp_path, family, options, width):
    path = save_tiny_family(family, str(tmp_path), **options)
    with safe_open(tmp_path / "model.safetensors", "pt") as weights:
        num_weights = len(weights.keys())
    shape = read_shape(path)
    assert (shape.num_tensors, shape.intermediate_size) == (num_weights, width)


def test_of_a_mixture_the_experts_that_a_token_does_not_choose_are_idle(tmp_path):
    """Qwen3-30B-A3B, by its published config: 30.5 B parameters, of which 3.3 B are active for a token."""
    sizes = {
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "head_dim": 128,
    }
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
    Qwen3MoeConfig(vocab_size=151936, **sizes, **experts).save_pretrained(tmp_path)
    shape = read_shape(tmp_path)
    assert shape.num_parameters == pytest.approx(30.53e9, rel=1e-3)
    active = shape.num_parameters - shape.idle_parameters
    assert active == pytest.approx(3.35e9, rel=1e-2)
    assert shape.parameters_of(1) == pytest.approx(active)
    assert shape.parameters_of(100) == pytest.approx(shape.num_parameters, rel=2e-3)
    assert shape.intermediate_size == 8 * 768
