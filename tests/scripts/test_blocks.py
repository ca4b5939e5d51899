"""Tables of studies whose records stay as they are: none of the records has changed since a table was made of it."""

import hashlib
import re
from pathlib import Path

import pytest

SHORT = sorted((Path(__file__).parents[2] / "results").glob("*/short.md"))


@pytest.mark.parametrize("page", SHORT, ids=lambda page: page.parent.name)
def test_a_kept_table_is_of_the_records_that_are_there(page):
    names, digest = re.match(
        r"<!-- .* from (.*), sha256 (\w+)….*-->\n\| ", page.read_text()
    ).groups()
    records = b"".join((page.parent / name).read_bytes() for name in names.split())
    assert hashlib.sha256(records).hexdigest().startswith(digest) and len(digest) == 16
