# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0

function error_exit() {
    echo "Error: $1"
    exit 1
}

function test_fail() {
    RET=1
    FAILED_CASES="$FAILED_CASES $1"
    echo "Error: sub-test failed: $1"
}

RET=0
FAILED_CASES=""

# The repository: TE_EXT_PATH; or TE_PATH, unless that is Transformer Engine's own tree; or where this script lies.
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
if [ -d "${TE_PATH:-}/transformer_engine_ext" ]; then HERE="$TE_PATH"; fi
: ${TE_EXT_PATH:=$HERE}
cd "$TE_EXT_PATH" || error_exit "no such folder: $TE_EXT_PATH"

if [ -z "${XML_LOG_DIR:-}" ]; then
    if [ -w /logs ]; then XML_LOG_DIR=/logs; else XML_LOG_DIR="$(mktemp -d)"; fi
fi
mkdir -p "$XML_LOG_DIR" || error_exit "cannot write to XML_LOG_DIR=$XML_LOG_DIR"

: ${TE_PATH:=/opt/transformerengine}
TE_TESTS="$TE_PATH/tests/pytorch"
[ -d "$TE_TESTS" ] || error_exit "TE_PATH=$TE_PATH has no tests/pytorch; point it at Transformer Engine's sources"

python3 -c "import pytest, torch" || pip3 install pytest==8.2.1 || error_exit "Failed to install pytest"
python3 -c "import transformer_engine.pytorch" || error_exit "Failed to import Transformer Engine"
[ "$(python3 -c "import torch; print(torch.cuda.device_count())")" -ge 1 ] || error_exit "these tests need a GPU"
export NVTE_EXT_FAIL_WITHOUT_CUDA=1

QA="$TE_EXT_PATH/qa/L1_pytorch_te_integration"
export PYTHONPATH="$TE_EXT_PATH:$QA${PYTHONPATH:+:$PYTHONPATH}"
# As Transformer Engine's own script runs them. PYTEST_ARGS: say, "-n 4" with pytest-xdist; it is left out where tests
# write into one file. Their settings, not those of this repository: no pyproject.toml is read.
export PYTORCH_JIT=0 NVTE_TORCH_COMPILE=0 NVTE_ALLOW_NONDETERMINISTIC_ALGO=0 NVTE_FUSED_ATTN=0
: ${PYTEST_ARGS:=}
SETTINGS="-c /dev/null --rootdir $TE_TESTS -p no:cacheprovider"

set -x

# Transformer Engine's own tests, as installed and patched: what passes as installed must pass patched.
function both_ways() { # name, then what to run
    name="$1"
    shift
    python3 -m pytest --tb=short $SETTINGS --junitxml=$XML_LOG_DIR/te_${name}_unpatched.xml "$@"
    python3 -m pytest --tb=short $SETTINGS --junitxml=$XML_LOG_DIR/te_${name}_patched.xml -p patch_plugin "$@"
    python3 "$QA/compare_junit.py" $XML_LOG_DIR/te_${name}_unpatched.xml $XML_LOG_DIR/te_${name}_patched.xml ||
        test_fail "$name"
}

both_ways numerics "$TE_TESTS/test_numerics.py" -k "recompute or checkpoint"
both_ways cuda_graphs "$TE_TESTS/test_cuda_graphs.py" $PYTEST_ARGS
both_ways selective "$TE_TESTS/layernorm_mlp/test_selective_activation_checkpoint.py" $PYTEST_ARGS

unset NVTE_FUSED_ATTN
python3 -m pytest --tb=auto --junitxml=$XML_LOG_DIR/pytest_te_integration.xml \
    tests/pytorch/test_te_fp8.py \
    tests/pytorch/test_te_patching.py \
    || test_fail "te_integration"
python3 -m transformer_engine_ext doctor --junitxml $XML_LOG_DIR/doctor_patched.xml --expect patched || test_fail "doctor"

if [ "$RET" -ne 0 ]; then
    echo "Error in the following test cases:$FAILED_CASES"
    exit 1
fi
echo "All tests passed"
