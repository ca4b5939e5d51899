"""Fixtures and hooks of all tests here; extras/conftest.py takes the same."""

from shared_fixtures import (
    model,
    one_rank,
    pytest_collection_modifyitems,
    untied,
)

__all__ = ["model", "one_rank", "pytest_collection_modifyitems", "untied"]
