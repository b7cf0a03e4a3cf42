# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0

# Percent of the branches and lines of rng/ and recompute/ that the tests must reach; 0 only prints.
: ${NVTE_EXT_TEST_COVERAGE:=95}

# Processes that run the tests; 0 runs them in pytest's own.
: ${NVTE_EXT_TEST_PROCESSES:=2}

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

python3 -c "import pytest, pytest_timeout, pytest_cov, xdist, hypothesis, nbformat, safetensors, tqdm, torch" ||
    pip3 install -e ".[test]" || error_exit "Failed to install the tests' requirements"

# Few processes for all files: importing torch takes seconds, and a file often less. The tensors are small, so more than
# one thread per process only makes the ranks of a distributed test wait for each other.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

# Where a native library is built that is not installed: once for both runs below.
export NVTE_EXT_CACHE_DIR="${NVTE_EXT_CACHE_DIR:-$(mktemp -d)}"

# What regions do is done by Python where there is no native library, as a rule here; so the tests that run most regions
# are run with one first. The main run comes last: it is what this script's output ends with.
NO_LIBRARY="$(python3 -c "
from transformer_engine_ext.pytorch.rng.native_build import STREAMS
print(STREAMS.obstacle() or '')
")" || error_exit "Failed to ask whether a native library can be built"

if [ -n "$NO_LIBRARY" ]; then
    echo "The tests with streams moved by the native library are left out: $NO_LIBRARY"
else
    NVTE_EXT_TEST_MOVES=native python3 -m pytest --tb=auto --junitxml=$XML_LOG_DIR/pytest_native_unittest.xml \
        -n $NVTE_EXT_TEST_PROCESSES --dist loadfile --no-loadscope-reorder --durations=3 \
        tests/pytorch/test_recompute_rng_limits.py \
        tests/pytorch/test_checkpoint_memory.py \
        tests/pytorch/test_checkpoint_misc.py \
        tests/pytorch/test_recompute_surroundings.py \
        tests/pytorch/test_checkpoint_depth_and_threads.py \
        tests/pytorch/test_audit_cost.py \
        tests/pytorch/test_backends.py \
        tests/pytorch/test_capture_whole.py \
        tests/pytorch/test_checkpoint_aliases.py \
        tests/pytorch/test_checkpoint_arguments.py \
        tests/pytorch/test_checkpoint_autocast.py \
        tests/pytorch/test_checkpoint_autograd.py \
        tests/pytorch/test_checkpoint_callables.py \
        tests/pytorch/test_checkpoint_callers_objects.py \
        tests/pytorch/test_checkpoint_determinism.py \
        tests/pytorch/test_checkpoint_early_stop.py \
        tests/pytorch/test_checkpoint_exceptions.py \
        tests/pytorch/test_checkpoint_inputs.py \
        tests/pytorch/test_checkpoint_mutations.py \
        tests/pytorch/test_checkpoint_nesting.py \
        tests/pytorch/test_checkpoint_user_hooks.py \
        tests/pytorch/test_checkpoint_wrappers.py \
        tests/pytorch/test_control_group.py \
        tests/pytorch/test_device_coverage.py \
        tests/pytorch/test_fp8_state.py \
        tests/pytorch/test_original_fix.py \
        tests/pytorch/test_phase_flags.py \
        tests/pytorch/test_recompute_rng.py \
        tests/pytorch/test_recompute_rng_around.py \
        tests/pytorch/test_recompute_rng_births.py \
        tests/pytorch/test_recompute_rng_edges.py \
        tests/pytorch/test_recompute_rng_more.py \
        tests/pytorch/test_recompute_rng_states.py \
        tests/pytorch/test_recompute_rng_traces.py \
        tests/pytorch/test_region_hooks.py \
        tests/pytorch/test_rng_guard.py \
        tests/pytorch/test_torch_options.py \
        tests/pytorch/test_torch_rules.py \
        tests/pytorch/test_torch_selective.py \
        tests/pytorch/test_tracker.py \
        tests/pytorch/test_tracker_kinds.py \
        || test_fail "unittest with the native library"
fi

# Processes take the files in this order, each the next one when it is done with another. Those that take longest come
# first, so that no process still has one of them to run when the others are done.
set -x

python3 -m pytest --tb=auto --junitxml=$XML_LOG_DIR/pytest_unittest.xml \
    --cov --cov-config=pyproject.toml --cov-report=term --cov-fail-under=$NVTE_EXT_TEST_COVERAGE \
    -n $NVTE_EXT_TEST_PROCESSES --dist loadfile --no-loadscope-reorder --durations=10 \
    tests/pytorch/distributed/test_save_load_ranks.py \
    tests/pytorch/test_demo.py \
    tests/pytorch/test_fuzz_programs.py \
    tests/pytorch/distributed/test_verify_ranks.py \
    tests/pytorch/test_examples.py \
    tests/pytorch/distributed/test_parallel_rng_ranks.py \
    tests/pytorch/distributed/test_saved_activations.py \
    tests/pytorch/test_recompute_rng_limits.py \
    tests/pytorch/test_native_library.py \
    tests/pytorch/test_moves_edges.py \
    tests/pytorch/test_moves_regions.py \
    tests/pytorch/test_helpers.py \
    tests/pytorch/test_checkpoint_memory.py \
    tests/pytorch/test_patching.py \
    tests/pytorch/test_broken_transformer_engine.py \
    tests/pytorch/test_messages.py \
    tests/pytorch/test_doctor.py \
    tests/pytorch/test_benchmarks.py \
    tests/pytorch/distributed/test_dtensor_checkpoint.py \
    tests/pytorch/test_recompute_surroundings.py \
    tests/pytorch/test_cli_endings.py \
    tests/pytorch/distributed/test_fsdp2_checkpoint.py \
    tests/pytorch/test_inspect.py \
    tests/pytorch/distributed/test_ddp_checkpoint.py \
    tests/pytorch/test_docs.py \
    tests/pytorch/test_save_paths.py \
    tests/pytorch/test_layering.py \
    tests/pytorch/test_notes.py \
    tests/pytorch/test_qa_scripts.py \
    tests/pytorch/test_imports.py \
    tests/pytorch/test_proof.py \
    tests/pytorch/test_audit_cost.py \
    tests/pytorch/test_backends.py \
    tests/pytorch/test_backends_simulated.py \
    tests/pytorch/test_capture_errors.py \
    tests/pytorch/test_capture_fakes.py \
    tests/pytorch/test_capture_lifetime.py \
    tests/pytorch/test_capture_nodes.py \
    tests/pytorch/test_capture_registration.py \
    tests/pytorch/test_capture_selective.py \
    tests/pytorch/test_capture_split.py \
    tests/pytorch/test_capture_whole.py \
    tests/pytorch/test_checkpoint_aliases.py \
    tests/pytorch/test_checkpoint_arguments.py \
    tests/pytorch/test_checkpoint_autocast.py \
    tests/pytorch/test_checkpoint_autograd.py \
    tests/pytorch/test_checkpoint_callables.py \
    tests/pytorch/test_checkpoint_callers_objects.py \
    tests/pytorch/test_checkpoint_depth_and_threads.py \
    tests/pytorch/test_checkpoint_determinism.py \
    tests/pytorch/test_checkpoint_early_stop.py \
    tests/pytorch/test_checkpoint_exceptions.py \
    tests/pytorch/test_checkpoint_inputs.py \
    tests/pytorch/test_checkpoint_misc.py \
    tests/pytorch/test_checkpoint_mutations.py \
    tests/pytorch/test_checkpoint_nesting.py \
    tests/pytorch/test_checkpoint_user_hooks.py \
    tests/pytorch/test_checkpoint_wrappers.py \
    tests/pytorch/test_collisions.py \
    tests/pytorch/test_control_group.py \
    tests/pytorch/test_debug_history.py \
    tests/pytorch/test_demo_report.py \
    tests/pytorch/test_derivations.py \
    tests/pytorch/test_device_coverage.py \
    tests/pytorch/test_error_text.py \
    tests/pytorch/test_fp8_state.py \
    tests/pytorch/test_held_streams.py \
    tests/pytorch/test_held_streams_cuda.py \
    tests/pytorch/test_megatron_core_seeds.py \
    tests/pytorch/test_native.py \
    tests/pytorch/test_native_build.py \
    tests/pytorch/test_native_extension.py \
    tests/pytorch/test_native_jit.py \
    tests/pytorch/test_native_setup.py \
    tests/pytorch/test_native_streams.py \
    tests/pytorch/test_megatron_format.py \
    tests/pytorch/test_moves.py \
    tests/pytorch/test_moves_cuda.py \
    tests/pytorch/test_mutation_gaps.py \
    tests/pytorch/test_mutation_gaps_more.py \
    tests/pytorch/test_mutation_gaps_settings.py \
    tests/pytorch/test_original_fix.py \
    tests/pytorch/test_parallel_rng.py \
    tests/pytorch/test_patching_megatron.py \
    tests/pytorch/test_parallel_rng_arguments.py \
    tests/pytorch/test_phase_flags.py \
    tests/pytorch/test_recompute_rng.py \
    tests/pytorch/test_recompute_rng_around.py \
    tests/pytorch/test_recompute_rng_births.py \
    tests/pytorch/test_recompute_rng_edges.py \
    tests/pytorch/test_recompute_rng_more.py \
    tests/pytorch/test_recompute_rng_states.py \
    tests/pytorch/test_recompute_rng_traces.py \
    tests/pytorch/test_region_hooks.py \
    tests/pytorch/test_resharding.py \
    tests/pytorch/test_rng_file.py \
    tests/pytorch/test_rng_guard.py \
    tests/pytorch/test_scale.py \
    tests/pytorch/test_scale_saving.py \
    tests/pytorch/test_state.py \
    tests/pytorch/test_streams.py \
    tests/pytorch/test_te_rng_names.py \
    tests/pytorch/test_torch_options.py \
    tests/pytorch/test_torch_rules.py \
    tests/pytorch/test_torch_selective.py \
    tests/pytorch/test_tracker.py \
    tests/pytorch/test_tracker_kinds.py \
    tests/pytorch/test_verify.py \
    tests/pytorch/test_work_counts.py \
    || test_fail "unittest"

set +x

if [ "$RET" -ne 0 ]; then
    echo "Error in the following test cases:$FAILED_CASES"
    exit 1
fi
echo "All tests passed"
