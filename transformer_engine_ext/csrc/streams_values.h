// Copyright (c) 2026, transformer-engine-ext authors.
// SPDX-License-Identifier: Apache-2.0
//
// Values of RNG streams: what tells where one stands, read from and written to torch's generators. For streams.cpp.

#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>
#include <optional>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>

namespace {

// ------------------------------------------------------------------------------------------------- CUDA streams

struct Philox {
  uint64_t seed, offset;
};

// Note [Torch asks the driver for every number]
// Generator.get_offset asks the driver whether a graph is being captured, set_offset does so twice. That takes a third of
// a microsecond in a loop and two in a training step, for each of 32 reads and writes that a region with three streams
// needs. So of a set of streams only the first is read by torch's method, which throws under capture; of the others, and
// to write, the fields are used that these methods use. They are private, and the same in torch 2.8 to 2.14 at least. An
// explicit instantiation may name a private member; a torch without it does not compile this file, and then Python does
// the work. A torch whose method tells something else than the field is not trusted again.
struct State {
  using Type = c10::intrusive_ptr<at::CUDAGeneratorState>;
  friend Type& reach(State, at::CUDAGeneratorImpl& generator);
};
struct KeepsRnnState {
  using Type = std::atomic_flag;
  friend Type& reach(KeepsRnnState, at::CUDAGeneratorImpl& generator);
};
template <class Field, auto member>
struct Reach {
  friend typename Field::Type& reach(Field, at::CUDAGeneratorImpl& generator) { return generator.*member; }
};
template struct Reach<State, &at::CUDAGeneratorImpl::state_>;
template struct Reach<KeepsRnnState, &at::CUDAGeneratorImpl::no_reset_rnn_state_>;

bool fields_agree = true;

// Reads and writes one set of CUDA streams.
class Cuda {
 public:
  // False where torch refuses, as it does while a graph is being captured: the backend knows what to do then.
  bool read(at::Generator& generator, Philox& value) {
    try {
      std::lock_guard<std::mutex> lock(generator.mutex());  // who draws holds it
      if (!may_use_fields(generator)) return false;
      const at::CUDAGeneratorState& state = *reach(State{}, impl_of(generator));
      value = {state.seed_, state.philox_offset_per_thread_};
      if (!fields_agree) value = {generator.current_seed(), generator.get_offset()};
      return true;
    } catch (const std::exception&) {
      return false;
    }
  }

  bool write(at::Generator& generator, const Philox& value) {
    try {
      std::lock_guard<std::mutex> lock(generator.mutex());
      if (!may_use_fields(generator)) return false;
      at::CUDAGeneratorState& state = *reach(State{}, impl_of(generator));
      if (fields_agree && value.offset % 4 == 0) {  // torch refuses others
        state.seed_ = value.seed;
        state.philox_offset_per_thread_ = value.offset;
        reach(KeepsRnnState{}, impl_of(generator)).clear();
      } else {
        if (generator.current_seed() != value.seed) generator.set_current_seed(value.seed);
        generator.set_offset(value.offset);
      }
      return true;
    } catch (const std::exception&) {
      return false;
    }
  }

 private:
  static at::CUDAGeneratorImpl& impl_of(at::Generator& generator) {
    return *static_cast<at::CUDAGeneratorImpl*>(generator.unsafeGetGeneratorImpl());
  }

  // Throws, or returns false, under capture.
  bool may_use_fields(at::Generator& generator) {
    if (status_ == Status::unknown) {
      status_ = Status::captured;
      const Philox told = {generator.current_seed(), generator.get_offset()};
      status_ = Status::eager;
      const at::CUDAGeneratorState& state = *reach(State{}, impl_of(generator));
      if (told.seed != state.seed_ || told.offset != state.philox_offset_per_thread_) fields_agree = false;
    }
    return status_ == Status::eager;
  }

  enum class Status { unknown, eager, captured } status_ = Status::unknown;
};

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
