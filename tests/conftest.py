"""Fixtures and hooks of all tests here; extras/conftest.py takes the same."""

from shared_fixtures import (
    model,
    one_rank,
    pytest_collection_modifyitems,
    pytest_ignore_collect,
    untied,
)

__all__ = ["model", "one_rank", "pytest_collection_modifyitems", "pytest_ignore_collect", "untied"]
