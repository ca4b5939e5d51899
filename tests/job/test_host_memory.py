"""Whether a host has memory for weights and held versions, which is asked at a run's start."""

from types import SimpleNamespace

import pytest

from asyncrl.config import Config
from asyncrl.job.host_memory import check_host_memory

SIZE = 10**9
"""Parameters."""


@pytest.mark.parametrize(
    ("options", "gb"),
    [
        # 16 bytes to train, and three copies for an engine
        ({"dtype": "float32"}, 28),
        ({"dtype": "bfloat16"}, 22),
        ({"dtype": "bfloat16", "lora_rank": 8}, 6),
        ({"dtype": "bfloat16", "publish_delay": 4}, 32),
    ],
)
def test_a_run_that_needs_more_memory_than_is_free_is_refused(options, gb, monkeypatch):
    def give(free):
        monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=free))

    config = Config(**options)
    give(gb * 10**9)
    check_host_memory(config, SIZE)
    give(gb * 10**9 - 1)
    needed = f"at least {gb} GB of host memory"
    if "publish_delay" in options:
        needed += ", with 5 versions of the weights for --publish-delay 4"
    with pytest.raises(ValueError, match=f"{needed}, and .* are free; use a smaller --model"):
        check_host_memory(config, SIZE)
