"""Fixtures and hooks of the tests of extras: those of all tests."""

from shared_fixtures import (
    model,
    one_rank,
    pytest_collection_modifyitems,
    untied,
)

__all__ = ["model", "one_rank", "pytest_collection_modifyitems", "untied"]
