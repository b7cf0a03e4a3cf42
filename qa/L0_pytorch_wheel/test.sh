# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0

# Builds the sdist and the wheels, with and without the native libraries, and installs each in every way that the README
# names, into environments of its own. Nothing is written into the checkout.

set -e

function error_exit() {
    echo "Error: $1"
    exit 1
}

# The repository: TE_EXT_PATH; or TE_PATH, unless that is Transformer Engine's own tree; or where this script lies.
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
if [ -d "${TE_PATH:-}/transformer_engine_ext" ]; then HERE="$TE_PATH"; fi
: ${TE_EXT_PATH:=$HERE}
QA="$TE_EXT_PATH/qa/L0_pytorch_wheel"

python3 -c "import build, pytest, uv" 2>/dev/null || pip3 install "build>=1.2" "pytest>=8" uv ||
    error_exit "Failed to install build, pytest and uv"

WORK="$(mktemp -d)"
trap 'rm -rf "$WORK"' EXIT
cd "$WORK"

echo "Building the sdist, and from it the wheel without the native libraries"
# So a file that MANIFEST.in forgets is missing in all that follows.
python3 -m build --installer uv --outdir dist "$TE_EXT_PATH" > build.log 2>&1 || { cat build.log; error_exit "Failed to build"; }
SDIST="$(echo "$WORK"/dist/*.tar.gz)"
PURE="$(echo "$WORK"/dist/*.whl)"
mkdir source && tar -xzf "$SDIST" --strip-components=1 -C source

# Torch and the other requirements are those of this environment, by links in a folder without this package: installing
# torch anew for each way would take minutes. An environment sees them through a .pth file.
python3 "$QA/link_requirements.py" "$WORK/requirements"
function new_environment() {
    python3 -m venv --without-pip "$WORK/$1"
    echo "$WORK/requirements" > "$(echo "$WORK/$1"/lib/python3*/site-packages)/requirements.pth"
}
function pip_into() {
    local name="$1"
    shift
    python3 -m pip --python "$WORK/$name/bin/python" --disable-pip-version-check install -q --no-compile "$@"
}

echo "Building the wheel with the native libraries"
new_environment builder
pip_into builder "setuptools>=77"  # nothing else: without isolation a build uses what is installed
if python3 -c "import sys, torch; sys.exit(torch.version.cuda is None or hasattr(torch.Generator, 'philox_state'))"; then
    STAND_IN=""
else
    echo "  this torch has a use for one of the two only, so a stand-in for torch and compiler: the packaging is tested,"
    echo "  the libraries are not"
    STAND_IN="$QA/stand_in"
    export CXX="python3 -S -E $STAND_IN/compiler.py"
fi
PYTHONPATH="$STAND_IN" NVTE_EXT_WITH_CSRC=1 python3 -m pip --python "$WORK/builder/bin/python" \
    --disable-pip-version-check wheel -q --no-build-isolation --no-deps -w "$WORK/native" "$SDIST" ||
    error_exit "Failed to build the native wheel"
unset CXX
NATIVE="$(echo "$WORK"/native/*.whl)"
python3 "$QA/check_contents.py" "$TE_EXT_PATH" "$SDIST" "$PURE" "$NATIVE" || error_exit "contents"

# Installs one way, and uses what came out from a folder where no checkout is in reach; prints one line.
function try_way() {
    local name="$1" seconds=$SECONDS
    shift
    new_environment "$name" && "$@" && (
        cd "$WORK/$name"
        bin/python -W error "$QA/check_import.py" "$WORK/$name" &&
            bin/te-ext --version > /dev/null &&
            bin/python -W error -m transformer_engine_ext --help > /dev/null
    ) && echo "ok     $name ($((SECONDS - seconds)) s)" || echo "FAILED $name"
}
function no_isolation() {
    pip_into "$1" "setuptools>=77" && pip_into "$1" --no-deps --no-build-isolation "$WORK/source-$1"
}
# uv sees installed distributions in the environment's own folder only, and would fetch torch.
function with_uv() {
    python3 -m uv pip install -q --python "$WORK/$1/bin/python" --no-deps "$2"
}

echo "Installing"
# One of them looks at the requirements too; that takes pip seconds, and the metadata are the same in all.
cp -r source source-pip-folder && cp -r source source-pip-no-build-isolation && cp -r source source-uv-folder
{
    try_way pip-wheel pip_into pip-wheel "$PURE"
    try_way pip-native-wheel pip_into pip-native-wheel --no-deps "$NATIVE"
    try_way pip-sdist pip_into pip-sdist --no-deps "$SDIST"
} > first.log 2>&1 &
{
    try_way pip-folder pip_into pip-folder --no-deps "$WORK/source-pip-folder"
    try_way pip-no-build-isolation no_isolation pip-no-build-isolation
    try_way uv-folder with_uv uv-folder "$WORK/source-uv-folder"
    try_way uv-wheel with_uv uv-wheel "$PURE"
} > second.log 2>&1
wait
cat first.log second.log | tee ways.log
[ "$(grep -c '^ok ' ways.log)" = 7 ] || error_exit "installing"

BUILT="$(echo "$WORK"/pip-no-build-isolation/lib/python3*/site-packages/transformer_engine_ext/csrc/streams.so)"
if [ -f "$BUILT" ]; then
    echo "Using the native library that the installation without build isolation compiled"
    (cd "$WORK/pip-no-build-isolation" && NVTE_EXT_NATIVE=1 bin/python -W error -c "
import sys
from transformer_engine_ext.pytorch.rng.native_streams import load, streams_status
load()
usable, how = streams_status()
sys.exit(None if usable and how.startswith('$BUILT, ') else how)") || error_exit "native library"
else
    echo "  no compiler or no Python headers here, so no native library was compiled to be used"
fi

echo "Using the pytest plug-in of the installed package"
cat > "$WORK/pip-wheel/test_guard.py" << 'PYTHON'
import torch
from transformer_engine_ext import te_checkpoint

def test_guard(rng_guard):
    te_checkpoint(torch.nn.Dropout(0.5), torch.ones(8, requires_grad=True)).sum().backward()
    assert rng_guard.recomputes == 1
PYTHON
(cd "$WORK/pip-wheel" && bin/python -m pytest -q -W error -p no:cacheprovider test_guard.py) || error_exit "plug-in"

echo "All checks passed"
