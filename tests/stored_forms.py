"""The form in which records are stored or sent, as a digest: it changes with a field, its type or its default."""

import hashlib
import json
from collections.abc import Iterable

import msgspec


def digest_of_form(kinds: Iterable[type]) -> str:
    """Return a digest of the fields of these classes and of all classes in them. Docstrings do not change it."""
    schemas, definitions = msgspec.json.schema_components(
        kinds, schema_hook=lambda kind: {"type": kind.__name__}
    )
    form = json.dumps(_without_texts([schemas, definitions]), sort_keys=True)
    return hashlib.sha256(form.encode()).hexdigest()[:16]


def _without_texts(part):
    if isinstance(part, dict):
        return {key: _without_texts(value) for key, value in part.items() if key != "description"}
    return [*map(_without_texts, part)] if isinstance(part, list | tuple) else part
