#!/usr/bin/env bash
# The pages as a site with search, light and dark, in site/ or another folder: bash scripts/docs.sh [FOLDER]
# A warning, such as a link to nothing, is an error. docs/conf.py has the settings.
set -euo pipefail
cd "$(dirname "$0")/.."
.venv/bin/python -m sphinx --fail-on-warning --quiet -c docs . "${1:-site}"
echo "site: ${1:-site}/index.html, or .venv/bin/python -m http.server -d ${1:-site} for a search that quotes pages"
