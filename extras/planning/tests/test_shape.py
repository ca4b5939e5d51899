import pytest
from tiny_policy import save_tiny_model
from transformers import AutoModelForCausalLM

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
