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

python3 -c "import pytest, torch" || pip3 install pytest==8.2.1 || error_exit "Failed to install pytest"
python3 -c "import transformer_engine.pytorch, megatron.core" || error_exit "Failed to import Transformer Engine or Megatron-core"
[ "$(python3 -c "import torch; print(torch.cuda.device_count())")" -ge 1 ] || error_exit "these tests need a GPU"
export NVTE_EXT_FAIL_WITHOUT_CUDA=1

export PYTHONPATH="$TE_EXT_PATH${PYTHONPATH:+:$PYTHONPATH}"
export NVTE_ALLOW_NONDETERMINISTIC_ALGO=0
# Before torch 2.14 CUDA graphs need a native library: built with the package, or here.
: ${NVTE_EXT_JIT:=1}
export NVTE_EXT_JIT
python3 -c "from transformer_engine_ext.pytorch.rng import native; native.prepare()" || error_exit "No native library"

set -x

python3 -m pytest --tb=auto --junitxml=$XML_LOG_DIR/pytest_mcore_integration.xml tests/pytorch/test_mcore.py ||
    test_fail "test_mcore.py"

# A small GPT with dropout: every kind of recompute and of CUDA graphs against none, as installed and patched.
GPT="$TE_EXT_PATH/qa/L1_pytorch_mcore_integration"
RUNS="$(mktemp -d)"
bash "$GPT/run_all.sh" "$RUNS"
python3 "$GPT/compare_gpt.py" "$RUNS" || test_fail "gpt"
rm -rf "$RUNS"

if [ "$RET" -ne 0 ]; then
    echo "Error in the following test cases:$FAILED_CASES"
    exit 1
fi
echo "All tests passed"
