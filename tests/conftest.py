"""Fixtures and hooks of all tests here; extras/conftest.py takes the same."""

from shared_fixtures import (
    browser,
    model,
    one_rank,
    pytest_collection_modifyitems,
    untied,
)

__all__ = ["browser", "model", "one_rank", "pytest_collection_modifyitems", "untied"]
