"""Tables of studies whose records stay as they are: none of the records has changed since a table was made of it."""

import hashlib
import re
from pathlib import Path

import pytest

SHORT = sorted((Path(__file__).parents[2] / "results").glob("*/short.md"))


def sha256(data):
    return hashlib.sha256(data).hexdigest()[:16]


@pytest.mark.parametrize("page", SHORT, ids=lambda page: page.parent.name)
def test_a_kept_table_is_of_the_records_that_are_there(page):
    head, body = page.read_text().split("\n", 1)
    names, *digests = re.fullmatch(
        r"<!-- .* from (.*), sha256 (\w+)…, page sha256 (\w+)…. -->", head
    ).groups()
    records = b"".join((page.parent / name).read_bytes() for name in names.split())
    assert digests == [sha256(records), sha256(body.encode())] and body.startswith("| ")


def test_the_page_of_the_bandit_is_of_its_records():
    """The script is in commit 328bd34c00d3. Whoever makes page or records again writes their digests here."""
    folder = SHORT[0].parents[1] / "bandit"
    digests = [sha256((folder / name).read_bytes()) for name in ("README.md", "bandit.jsonl")]
    assert digests == ["745d4ffad080c3a5", "786f8d6ad04c28fe"]
