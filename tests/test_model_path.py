import os
import time

import pytest

from config import MULTI_TURN_TASKS
from model_path import resolve_model


@pytest.mark.parametrize("name", ["/no/such/folder", "no-such-model", "nobody/no-such-model", "a/b/c", "bad name!"])
def test_a_missing_model_is_one_line_within_seconds(name):
    start = time.monotonic()
    with pytest.raises(ValueError, match="--model") as caught:
        resolve_model(name, "addition")
    assert name in str(caught.value) and "Qwen/Qwen3-8B-Base" in str(caught.value) and "\n" not in str(caught.value)
    assert time.monotonic() - start < 15


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no config.json"):
        resolve_model(str(tmp_path), "addition")


def test_tiny_is_the_tiny_model_of_the_task():
    folders = {task: resolve_model("tiny", task) for task in ("addition", "gsm8k", *MULTI_TURN_TASKS)}
    assert folders["gsm8k"] == folders["addition"]
    assert len(set(folders.values())) == 1 + len(MULTI_TURN_TASKS)
    assert all("config.json" in os.listdir(folder) for folder in folders.values())
