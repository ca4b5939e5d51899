import pytest
from safetensors import safe_open
from tiny_policy import save_tiny_family
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from extras.planning.shape import read_shape


@pytest.mark.parametrize(
    ("family", "options", "width"),
    [
        ("qwen3", {"tie_word_embeddings": True}, 192),
        ("qwen3", {"tie_word_embeddings": False}, 192),
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
def test_the_config_says_what_the_loaded_model_has(tmp_path, family, options, width):
    """Families name their experts by names of their own."""
    path = save_tiny_family(family, str(tmp_path), **options)
    with safe_open(tmp_path / "model.safetensors", "pt") as weights:
        num_weights = len(weights.keys())
    model = AutoModelForCausalLM.from_pretrained(path)
    (tmp_path / "model.safetensors").unlink()  # the config is enough
    shape = read_shape(path)
    sizes = [parameter.numel() for parameter in model.parameters()]
    layers = [sum(p.numel() for p in layer.parameters()) for layer in model.model.layers]
    assert (shape.num_parameters, shape.largest_parameter) == (sum(sizes), max(sizes))
    assert shape.layer_parameters == max(layers)
    assert shape.root_parameters == sum(sizes) - sum(layers)
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
