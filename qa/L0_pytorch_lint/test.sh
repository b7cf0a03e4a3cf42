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

python3 -c "import ruff, mypy, pyright" 2>/dev/null || pip3 install -e ".[lint]" ||
    error_exit "Failed to install ruff, mypy and pyright"

echo "Checking code with ruff"
python3 -m ruff check . || error_exit "ruff check"
echo "Checking format with ruff"
python3 -m ruff format --check . || error_exit "ruff format (to apply it: ruff format .)"
echo "Checking types with mypy"
python3 -m mypy || error_exit "mypy"
echo "Checking the types that users see with mypy and pyright"
python3 -m mypy tests/typing/client.py || error_exit "mypy of code that uses the package"
python3 -m pyright --pythonpath "$(command -v python3)" || error_exit "pyright of code that uses the package"

echo "Checking shell scripts with bash -n"
for script in qa/*/test.sh .ci/run; do
    bash -n "$script" || error_exit "$script"
done

echo "All checks passed"
