import time

import pytest

from model_path import resolve_model


@pytest.mark.parametrize("name", ["/no/such/folder", "no-such-model", "nobody/no-such-model", "a/b/c", "bad name!"])
def test_a_missing_model_is_one_line_within_seconds(name):
    start = time.monotonic()
    with pytest.raises(ValueError, match="--model") as caught:
        resolve_model(name)
    assert name in str(caught.value) and "Qwen/Qwen3-8B-Base" in str(caught.value) and "\n" not in str(caught.value)
    assert time.monotonic() - start < 15


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no config.json"):
        resolve_model(str(tmp_path))
