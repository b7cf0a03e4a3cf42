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

python3 -c "import build" 2>/dev/null || pip3 install "build>=1.2" || error_exit "Failed to install build"

WORK="$(mktemp -d)"
trap 'rm -rf "$WORK"' EXIT

# The wheel is built from the sdist, so a file that MANIFEST.in forgets is missing below.
python3 -m build --outdir "$WORK/dist" "$TE_EXT_PATH" || error_exit "Failed to build"
python3 "$TE_EXT_PATH/qa/L0_pytorch_wheel/check_contents.py" "$WORK/dist" || error_exit "contents"

# Installed beside the requirements that are here already, and used from a folder where no checkout is in reach.
pip3 install --no-deps --target "$WORK/site" "$WORK"/dist/*.whl || error_exit "Failed to install the wheel"
cd "$WORK"
PYTHONPATH="$WORK/site" python3 -W error "$TE_EXT_PATH/qa/L0_pytorch_wheel/check_import.py" "$WORK/site" || error_exit "import"
PYTHONPATH="$WORK/site" python3 -W error -m transformer_engine_ext --help || error_exit "python -m"
PYTHONPATH="$WORK/site" "$WORK/site/bin/te-ext" --help > /dev/null || error_exit "te-ext"

echo "All tests passed"
