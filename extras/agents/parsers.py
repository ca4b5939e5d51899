"""The names of vLLM's parsers, so that a wrong one is refused before a worker starts.

They are read from vLLM's source, as an import of vLLM takes many seconds.
"""

import re
from importlib.util import find_spec
from pathlib import Path

from asyncrl.config import Rule, flag_of

PACKAGES = {"tool_parser": "tool_parsers", "reasoning_parser": "reasoning"}
"""The package of vLLM that has the parsers of an option."""


def parser_names(package: str) -> list[str]:
    """Return the parsers in a package of vLLM; empty without vLLM."""
    vllm = find_spec("vllm")
    if vllm is None:
        return []
    source = Path(vllm.origin).with_name(package) / "__init__.py"
    return sorted(re.findall(r'^    "([\w-]+)": \(', source.read_text(), re.MULTILINE))


def _make_rule(option: str) -> Rule:
    names = parser_names(PACKAGES[option])
    return (
        lambda c: bool(names) and getattr(c, option) not in ("", *names),
        f"{flag_of(option)} {{c.{option}}} is none of vLLM's: {', '.join(names)}",
    )


RULES = [_make_rule(option) for option in PACKAGES]
