"""The names of vLLM's parsers, so that a wrong one is refused before a worker starts.

They are read from vLLM's source, as an import of vLLM takes many seconds.
"""

import functools
import re
from importlib.util import find_spec
from pathlib import Path

from asyncrl.config import Config, Rule


@functools.cache
def parser_names(package: str) -> list[str]:
    """Return the parsers in `tool_parsers` or `reasoning` of vLLM; none without vLLM."""
    vllm = find_spec("vllm")
    if vllm is None:
        return []
    source = Path(vllm.origin).with_name(package) / "__init__.py"
    return sorted(re.findall(r'^    "([\w-]+)": \(', source.read_text(), re.MULTILINE))


def _is_unknown(name: str, package: str) -> bool:
    names = parser_names(package)
    return bool(name and names) and name not in names


def _is_unknown_tool_parser(config: Config) -> bool:
    return _is_unknown(config.tool_parser, "tool_parsers")


def _is_unknown_reasoning_parser(config: Config) -> bool:
    return _is_unknown(config.reasoning_parser, "reasoning")


RULES: list[Rule] = [
    (
        _is_unknown_tool_parser,
        f"--tool-parser {{c.tool_parser}} is none of vLLM's: {', '.join(parser_names('tool_parsers'))}",
    ),
    (
        _is_unknown_reasoning_parser,
        f"--reasoning-parser {{c.reasoning_parser}} is none of vLLM's: {', '.join(parser_names('reasoning'))}",
    ),
]
