"""Fixtures and hooks of the tests of extras: those of all tests."""

from shared_fixtures import one_rank, pytest_collection_modifyitems, pytest_ignore_collect

__all__ = ["one_rank", "pytest_collection_modifyitems", "pytest_ignore_collect"]
