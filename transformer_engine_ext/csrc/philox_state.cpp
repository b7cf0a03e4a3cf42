// Copyright (c) 2026, transformer-engine-ext authors.
// SPDX-License-Identifier: Apache-2.0
//
// Where a CUDA generator's random numbers come from while a graph is captured, for torch before 2.14: from there on
// torch.Generator.philox_state tells the same.
//
// One operator and no kernel, so a plain C++ compiler and torch's own headers are enough. It is registered with the
// dispatcher instead of bound to Python, so one build serves every version of Python. rng/native.py is its only caller.

#include <cstdint>
#include <mutex>
#include <optional>
#include <tuple>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <torch/library.h>

namespace {

// Returns (seed, offset, intragraph, captured). With captured, seed and offset are int64 tensors of shape (1,) on the
// generator's device which alias the words that every replay of the graph refills, and a kernel that is captured now
// draws at *offset + intragraph. Without, no graph is being captured on the current stream and both are empty.
//
// Throws torch's own error if a graph is being captured that the generator is not registered with.
std::tuple<at::Tensor, at::Tensor, int64_t, bool> captured_philox(const std::optional<at::Generator>& generator) {
  TORCH_CHECK(generator.has_value() && generator->defined(), "captured_philox needs a generator, got None");
  auto* impl = at::check_generator<at::CUDAGeneratorImpl>(generator);
  at::PhiloxCudaState state;
  {
    // Everybody who reads or moves a generator holds its mutex.
    std::lock_guard<std::mutex> lock(impl->mutex_);
    state = impl->philox_cuda_state(0);  // reserves nothing: the stream does not move
  }
  if (!state.captured_ || state.seed_.ptr == nullptr || state.offset_.ptr == nullptr) {
    return {at::empty({0}, at::kLong), at::empty({0}, at::kLong), 0, false};
  }
  // The graph owns the words; the tensors are views for as long as it lives.
  const auto options = at::TensorOptions().dtype(at::kLong).device(impl->device());
  return {
      at::from_blob(state.seed_.ptr, {1}, options),
      at::from_blob(state.offset_.ptr, {1}, options),
      static_cast<int64_t>(state.offset_intragraph_),
      true};
}

}  // namespace

// The schema says "Generator?" although a generator is required: the dispatcher knows no other generator argument, and
// a schema that does not fit the function aborts the process when the library is loaded.
TORCH_LIBRARY(transformer_engine_ext, m) {
  m.def("captured_philox(Generator? generator) -> (Tensor seed, Tensor offset, int intragraph, bool captured)",
        &captured_philox);
}
