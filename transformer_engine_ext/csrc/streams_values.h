// Copyright (c) 2026, transformer-engine-ext authors.
// SPDX-License-Identifier: Apache-2.0
//
// Values of RNG streams: what tells where one stands, read from and written to torch's generators. For streams.cpp.

#pragma once

#include <array>
#include <cstdint>
#include <exception>
#include <mutex>
#include <optional>

#include <ATen/CPUGeneratorImpl.h>

namespace {

// ------------------------------------------------------------------------------------------------- CUDA streams

struct Philox {
  uint64_t seed, offset;
};

// False where torch refuses, as it does while a graph is being captured: the backend knows what to do then.
bool read(at::Generator& generator, Philox& state) {
  try {
    std::lock_guard<std::mutex> lock(generator.mutex());
    state = {generator.current_seed(), generator.get_offset()};
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

bool write(at::Generator& generator, const Philox& state) {
  try {
    std::lock_guard<std::mutex> lock(generator.mutex());
    if (generator.current_seed() != state.seed) generator.set_current_seed(state.seed);
    generator.set_offset(state.offset);
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

// ------------------------------------------------------------------------------------------------- CPU streams

// Note [A CPU stream is taken as its twister]
// Generator.get_state gives 5,056 bytes as a tensor, which takes some microseconds to make and to read back: the twister's
// 624 words in eight bytes each. Here a value is the twister's own words and counters, and the halves of a pair of normals
// that wait for the next draw, as bytes. Equal bytes, equal streams: what does not count is always zero.
struct Twister {
  uint64_t seed;
  int32_t left;
  uint32_t next, seeded, has_single, has_twice;
  float single;
  double twice;
  std::array<uint32_t, at::MERSENNE_STATE_N> words;
};
static_assert(sizeof(Twister) == 40 + 4 * at::MERSENNE_STATE_N, "a hole would hold anything");

at::CPUGeneratorImpl& cpu_of(at::Generator& generator) {
  return *static_cast<at::CPUGeneratorImpl*>(generator.unsafeGetGeneratorImpl());
}

void read(at::CPUGeneratorImpl& generator, Twister& twister) {
  std::lock_guard<std::mutex> lock(generator.mutex_);
  const at::mt19937_data_pod engine = generator.engine().data();
  const std::optional<float> single = generator.next_float_normal_sample();
  const std::optional<double> twice = generator.next_double_normal_sample();
  twister = {engine.seed_, engine.left_, engine.next_, engine.seeded_, single.has_value(), twice.has_value(),
             single.value_or(0), twice.value_or(0), engine.state_};
}

void write(at::CPUGeneratorImpl& generator, const Twister& twister) {
  at::mt19937_data_pod data;
  data.seed_ = twister.seed;
  data.left_ = twister.left;
  data.next_ = twister.next;
  data.seeded_ = twister.seeded != 0;
  data.state_ = twister.words;
  at::mt19937 engine;
  engine.set_data(data);
  std::lock_guard<std::mutex> lock(generator.mutex_);
  generator.set_engine(engine);
  generator.set_next_float_normal_sample(twister.has_single != 0 ? std::optional<float>(twister.single) : std::nullopt);
  generator.set_next_double_normal_sample(twister.has_twice != 0 ? std::optional<double>(twister.twice) : std::nullopt);
}

}  // namespace
