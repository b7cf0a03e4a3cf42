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

python3 -c "import pytest, pytest_timeout, hypothesis, safetensors, tqdm, torch" ||
    pip3 install -e ".[test]" || error_exit "Failed to install the tests' requirements"

NUM_GPUS=$(python3 -c "import torch; print(torch.cuda.device_count())") || error_exit "Failed to import torch"
[ "$NUM_GPUS" -ge 2 ] || error_exit "these tests need two GPUs, found $NUM_GPUS; L0_pytorch_unittest runs them on gloo"

# A test that finds fewer GPUs than it needs skips, unless that many are promised here: then it fails.
export NVTE_EXT_FAIL_WITHOUT_CUDA=$NUM_GPUS

# Only the NCCL half of each file; the gloo half runs in L0.
python3 -m pytest -v -s -m requires_cuda --junitxml=$XML_LOG_DIR/pytest_distributed_unittest.xml \
    tests/pytorch/distributed/test_dtensor_checkpoint.py \
    tests/pytorch/distributed/test_parallel_rng_ranks.py \
    tests/pytorch/distributed/test_saved_activations.py \
    || test_fail "distributed_unittest"

# Tensor-parallel training over NCCL, all arms, with a stop and a resume in new processes.
python3 -m transformer_engine_ext demo --device cuda --nproc 2 || test_fail "te-ext demo"

if [ "$RET" -ne 0 ]; then
    echo "Error in the following test cases:$FAILED_CASES"
    exit 1
fi
echo "All tests passed"
