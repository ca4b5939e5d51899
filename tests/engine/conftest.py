"""The engine that these tests share, one for each of their files."""

import pytest

from asyncrl.config import Config


@pytest.fixture(scope="module")
def options():
    """Options of the engine and the trainer, which a file of tests may override."""
    return {}


@pytest.fixture(scope="module")
def pair(model, options):
    # Imported here, as pytest reads this file even where it collects no test beside it.
    from engine_pair import start_pair

    lengths = {"max_prompt_tokens": 200, "max_response_tokens": 100}
    config = Config(model=model, lr=1e-3, temperature=0.7, top_p=0.9, **lengths, **options)
    with start_pair(config) as pair:
        yield pair
