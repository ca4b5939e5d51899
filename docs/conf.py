"""The pages of the repository as a site: `bash scripts/docs.sh` writes site/.

Sphinx, because it reads the Markdown files where they are: their links work in a checkout and on the site. README.md is
the home page. Nothing is loaded from another host.
"""

import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # autodoc imports the code

from algos import LOSSES  # noqa: E402

project = html_title = "Asynchronous RL of language models"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
root_doc = "README"
PARTS = [f"results/*/{name}.md" for name in ("short", "findings", "mechanisms", "speed")]
"""Parts of pages, by cog."""
include_patterns = ["*.md", "docs/*.md", "extras/*/*.md", "results/**.md", "tests/README.md"]
exclude_patterns = [".*", "runs", "site", *PARTS]
suppress_warnings = ["toc.not_included"]  # tables of results/ have a link where they are used
highlight_language = "none"

myst_heading_anchors = 4
html_theme = "furo"
html_static_path = html_css_files = ["site.css"]
html_copy_source = False
smartquotes = False  # or --option becomes –option
html_show_sphinx = False

autodoc_default_options = {"members": True, "undoc-members": True, "member-order": "bysource"}
autodoc_typehints = "none"  # docstrings state shapes and types

CONTENTS = {
    "Start": ["docs/devices", "docs/predictions", "docs/extending", "docs/agents", "docs/telemetry"],
    "Look up": ["docs/reference", "docs/api", "docs/mechanisms", "docs/reliability"],
    "Findings": ["docs/staleness", "docs/losses", "docs/results", "results/README"],
    "Optional systems": [
        "extras/certificate/README", "extras/environments/README", "extras/planning/README",
        "extras/router_replay/README", "extras/simulation/page", "extras/swarm/README", "extras/trees/README",
    ],
    "Change the code": ["AGENTS", "tests/README", "CHANGELOG", "WORKLOG"],
}  # fmt: skip
"""Titles of the sidebar, and their pages."""
API = {
    "Records": ["asyncrl.records"],
    "Plugins": ["asyncrl.plugins"],
    "Parts of losses": [
        "algos.inputs", "algos.ratio", "algos.advantages", "algos.kl", "algos.objectives", "algos.proximal",
    ],
    "Losses": [f"algos.{name}" for name in LOSSES],
}  # fmt: skip
"""Modules whose docstrings are appended to docs/api.md."""


def change_source(app, name, source):
    """Remove the programs of cog from a page, and append the contents of README.md and of docs/api.md."""
    source[0] = re.sub(r"<!--\[\[\[.*?\]\]\]-->\n?", "", source[0], flags=re.DOTALL)
    if name == root_doc:
        for title, pages in CONTENTS.items():
            lines = [f"\n\n```{{toctree}}\n:hidden:\n:caption: {title}\n", *pages, "```"]
            source[0] += "\n".join(lines)
    if name == "docs/api":
        for title, modules in API.items():
            source[0] += f"\n\n## {title}\n"
            for module in modules:
                source[0] += f"\n### {module}\n\n```{{eval-rst}}\n.. automodule:: {module}\n```\n"


def as_restructured_text(app, what, name, value, options, lines):
    """Give autodoc a docstring in its markup: code in two backticks, formulas as they are, no other markup."""
    blocks = re.split(r"((?:^    .*\n?)+)", "\n".join(lines), flags=re.MULTILINE)
    for index, block in enumerate(blocks):
        if index % 2:
            blocks[index] = f"::\n\n{block}\n"
            continue
        parts = re.split(r"`([^`]*)`", block)
        parts[::2] = [re.sub(r"([\\*_|])", r"\\\1", text) for text in parts[::2]]
        parts[1::2] = [f"``{code}``\\ " for code in parts[1::2]]
        blocks[index] = "".join(parts)
    lines[:] = "".join(blocks).split("\n")


def copy_home_page(app, error):
    """Make the home page index.html, too, which is what a server shows of a folder."""
    if error is None and app.builder.name == "html":
        shutil.copy(Path(app.outdir) / "README.html", Path(app.outdir) / "index.html")


def setup(app):
    """Connect the functions to Sphinx."""
    app.connect("source-read", change_source)
    app.connect("autodoc-process-docstring", as_restructured_text)
    app.connect("build-finished", copy_home_page)
