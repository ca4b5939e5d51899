"""Which models are refused; errors.toml beside this file has the options that are."""

import pytest
from tiny_policy import make_config, save_tiny_family

from asyncrl.job.node import _check_model
from extras.router_replay.option import FAMILIES


@pytest.mark.parametrize("family", [*FAMILIES, "qwen3", "qwen3_next", "glm4_moe"])
def test_a_model_without_routers_that_are_known_is_refused_in_a_line(family, tmp_path):
    path = save_tiny_family(family, str(tmp_path))
    config = make_config(path, router_replay=True, dtype="bfloat16")
    if family in FAMILIES:
        _check_model(config, path, "cpu")
        return
    with pytest.raises(ValueError) as caught:
        _check_model(config, path, "cpu")
    line = str(caught.value)
    assert line == (
        f"--router-replay knows the routers of {', '.join(FAMILIES)}, and a {family} has others or none; leave it out, "
        "or take another --model"
    )
