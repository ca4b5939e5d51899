import json

import pytest
from tiny_policy import save_tiny_model
from transformers import AutoModelForCausalLM

from extras.planning.shape import read_shape
from scripts.qwen3_shapes import qwen3_config


@pytest.mark.parametrize("tied", [True, False])
def test_the_config_says_what_the_loaded_model_has(tmp_path, tied):
    path = save_tiny_model(tmp_path, tied)
    model = AutoModelForCausalLM.from_pretrained(path)
    shape = read_shape(path)
    assert shape.num_parameters == sum(p.numel() for p in model.parameters())
    assert shape.layer_parameters == sum(p.numel() for p in model.model.layers[0].parameters())
    assert shape.root_parameters == shape.num_parameters - 2 * shape.layer_parameters
    assert shape.largest_parameter == max(p.numel() for p in model.parameters())
    assert (shape.num_layers, shape.hidden_size, shape.num_key_value_heads, shape.head_dim) == (
        2,
        64,
        2,
        32,
    )


@pytest.mark.parametrize(("size", "millions"), [("0.6b", 596), ("8b", 8191)])
def test_without_weights_the_config_is_enough(tmp_path, size, millions):
    qwen3_config(size).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "qwen3"
    assert round(read_shape(tmp_path).num_parameters / 1e6) == millions
