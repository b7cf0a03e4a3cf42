# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0

set -e

function error_exit() {
    echo "Error: $1"
    exit 1
}

# The repository: TE_EXT_PATH; or TE_PATH, unless that is Transformer Engine's own tree; or where this script lies.
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
if [ -d "${TE_PATH:-}/transformer_engine_ext" ]; then HERE="$TE_PATH"; fi
: ${TE_EXT_PATH:=$HERE}
cd "$TE_EXT_PATH" || error_exit "no such folder: $TE_EXT_PATH"

# Where the pages go; by default they are only built to see that they can be.
if [ -z "${DOCS_OUT:-}" ]; then
    DOCS_OUT="$(mktemp -d)"
    trap 'rm -rf "$DOCS_OUT"' EXIT
fi

python3 -c "import sphinx, myst_parser, torch" 2>/dev/null || pip3 install -e ".[docs]" || error_exit "Failed to install sphinx"

# The samples on the pages are run by tests/pytorch/test_docs.py, without sphinx.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
python3 -m sphinx -E -W --keep-going -b html -d "$DOCS_OUT/.doctrees" docs "$DOCS_OUT" || error_exit "sphinx"
for page in index errors rules environment api/checkpointing; do
    [ -s "$DOCS_OUT/$page.html" ] || error_exit "no page $page.html"
done

echo "All pages built without a warning"
