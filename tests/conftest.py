"""Fixtures and hooks of all tests here; extras/conftest.py takes the same."""

from shared_fixtures import one_rank, pytest_collection_modifyitems, pytest_ignore_collect

__all__ = ["one_rank", "pytest_collection_modifyitems", "pytest_ignore_collect"]
