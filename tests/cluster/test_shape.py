import json

import pytest
import torch
from safetensors.torch import save_file
from tiny_policy import save_tiny_model
from transformers import AutoModelForCausalLM

from cluster.shape import parameter_sizes, read_shape
from scripts.qwen3_shapes import qwen3_config


@pytest.mark.parametrize("tied", [True, False])
def test_the_headers_say_what_the_loaded_model_has(tmp_path, tied):
    path = save_tiny_model(tmp_path, tied)
    model = AutoModelForCausalLM.from_pretrained(path)
    shape = read_shape(path)
    assert shape.num_parameters == sum(p.numel() for p in model.parameters())
    assert shape.layer_parameters == sum(p.numel() for p in model.model.layers[0].parameters())
    assert shape.root_parameters == shape.num_parameters - 2 * shape.layer_parameters
    assert shape.largest_parameter == max(p.numel() for p in model.parameters())
    assert (shape.num_layers, shape.hidden_size, shape.num_key_value_heads, shape.head_dim) == (2, 64, 2, 32)


def test_a_tied_head_that_a_file_holds_all_the_same_is_counted_once(tmp_path):
    weights = {"model.embed_tokens.weight": torch.zeros(5, 3), "lm_head.weight": torch.zeros(5, 3)}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    files = [tmp_path / "model.safetensors"]
    assert sum(parameter_sizes(files, tied=True).values()) == 15
    assert sum(parameter_sizes(files, tied=False).values()) == 30


def test_of_several_files_those_in_the_index_count_and_no_copy_beside_them(tmp_path):
    qwen3_config("tiny").save_pretrained(tmp_path)
    names = {"model.layers.0.w": "a.safetensors", "model.layers.1.w": "b.safetensors"}
    for name, file in names.items():
        save_file({name: torch.zeros(3, 4)}, tmp_path / file)
    save_file({name: torch.zeros(3, 4) for name in ("layers.0.w", "layers.1.w")}, tmp_path / "consolidated.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    shape = read_shape(tmp_path)
    assert (shape.num_parameters, shape.layer_parameters, shape.root_parameters) == (24, 12, 0)


@pytest.mark.parametrize(("size", "millions"), [("0.6b", 596), ("8b", 8191)])
def test_without_weights_the_config_is_enough(tmp_path, size, millions):
    qwen3_config(size).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "qwen3"
    assert round(read_shape(tmp_path).num_parameters / 1e6) == millions


@pytest.mark.parametrize("name", ["not a name", "../nowhere/to/be/found"])
def test_a_model_that_is_nowhere_is_refused_in_one_line_of_ours(name):
    with pytest.raises(
        ValueError, match=f"^--model {name}: neither a folder with a config.json nor to be had: [^\n]+$"
    ):
        read_shape(name)
