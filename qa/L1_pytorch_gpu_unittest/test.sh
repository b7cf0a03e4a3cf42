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
[ "$NUM_GPUS" -ge 1 ] || error_exit "these tests need a GPU; L0_pytorch_unittest has the tests for the CPU"

# A test that finds fewer GPUs than it needs skips, unless that many are promised here: then it fails.
export NVTE_EXT_FAIL_WITHOUT_CUDA=$NUM_GPUS

# Only the CUDA half of each file; the CPU half runs in L0.
python3 -m pytest -v -s -m requires_cuda --junitxml=$XML_LOG_DIR/pytest_gpu_unittest.xml \
    tests/pytorch/test_helpers.py \
    tests/pytorch/test_audit_cost.py \
    tests/pytorch/test_backends.py \
    tests/pytorch/test_capture_errors.py \
    tests/pytorch/test_capture_fakes.py \
    tests/pytorch/test_capture_kernels.py \
    tests/pytorch/test_capture_lifetime.py \
    tests/pytorch/test_capture_nodes.py \
    tests/pytorch/test_capture_registration.py \
    tests/pytorch/test_capture_selective.py \
    tests/pytorch/test_capture_split.py \
    tests/pytorch/test_capture_whole.py \
    tests/pytorch/test_checkpoint_autocast.py \
    tests/pytorch/test_checkpoint_memory.py \
    tests/pytorch/test_checkpoint_misc.py \
    tests/pytorch/test_checkpoint_user_hooks.py \
    tests/pytorch/test_demo.py \
    tests/pytorch/test_device_coverage.py \
    tests/pytorch/test_doctor.py \
    tests/pytorch/test_native_library.py \
    tests/pytorch/test_megatron_format.py \
    tests/pytorch/test_moves_cuda.py \
    tests/pytorch/test_mutation_gaps.py \
    tests/pytorch/test_mutation_gaps_more.py \
    tests/pytorch/test_original_fix.py \
    tests/pytorch/test_held_streams.py \
    tests/pytorch/test_parallel_rng.py \
    tests/pytorch/test_proof.py \
    tests/pytorch/test_verify.py \
    tests/pytorch/test_recompute_rng.py \
    tests/pytorch/test_recompute_rng_around.py \
    tests/pytorch/test_recompute_rng_births.py \
    tests/pytorch/test_recompute_rng_edges.py \
    tests/pytorch/test_recompute_rng_limits.py \
    tests/pytorch/test_recompute_rng_more.py \
    tests/pytorch/test_recompute_rng_states.py \
    tests/pytorch/test_recompute_rng_traces.py \
    tests/pytorch/test_recompute_surroundings.py \
    tests/pytorch/test_rng_file.py \
    tests/pytorch/test_rng_guard.py \
    tests/pytorch/test_state.py \
    tests/pytorch/test_streams.py \
    tests/pytorch/test_tracker.py \
    tests/pytorch/test_tracker_kinds.py \
    tests/pytorch/test_examples.py \
    tests/pytorch/test_fuzz_programs.py \
    tests/pytorch/test_capture_capturers.py \
    || test_fail "gpu_unittest"

# What is above ran with the native library that moves streams, where one is installed. Recomputes once more without it.
NVTE_EXT_TEST_MOVES=python python3 -m pytest -v -s -m requires_cuda --junitxml=$XML_LOG_DIR/pytest_gpu_python_unittest.xml \
    tests/pytorch/test_recompute_rng.py \
    tests/pytorch/test_recompute_rng_around.py \
    tests/pytorch/test_recompute_rng_births.py \
    tests/pytorch/test_recompute_rng_edges.py \
    tests/pytorch/test_recompute_rng_more.py \
    tests/pytorch/test_recompute_rng_states.py \
    tests/pytorch/test_recompute_rng_traces.py \
    || test_fail "gpu_unittest without the native library"

if [ "$RET" -ne 0 ]; then
    echo "Error in the following test cases:$FAILED_CASES"
    exit 1
fi
echo "All tests passed"
