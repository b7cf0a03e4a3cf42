// Copyright (c) 2026, transformer-engine-ext authors.
// SPDX-License-Identifier: Apache-2.0
//
// Moves of RNG streams, and the settings around a region, each for all streams or settings in one call.
//
// Everything here does what Python functions of rng/moves.py and recompute/ambient.py do, and calls those of the device
// backends for whatever it does not know: streams that are bound or captured, other kinds of devices. What it saves is
// time: a region asks for some fifty small things, and each costs a microsecond from Python with cold caches.
//
// An extension module of the limited API: one build serves every CPython from 3.10 on, but one version of torch.

#include <torch/csrc/Generator.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <exception>
#include <utility>

#include <ATen/Context.h>
#include <ATen/SequenceNumber.h>
#include <ATen/autocast_mode.h>
#include <c10/core/DefaultDtype.h>

#include "streams_values.h"

namespace {

// Owns one reference.
class Ref {
 public:
  explicit Ref(PyObject* object = nullptr) : object_(object) {}
  Ref(const Ref&) = delete;
  Ref& operator=(const Ref&) = delete;
  ~Ref() { Py_XDECREF(object_); }
  PyObject* get() const { return object_; }
  PyObject* release() { return std::exchange(object_, nullptr); }
  Ref& operator=(PyObject* object) {
    Py_XDECREF(std::exchange(object_, object));
    return *this;
  }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  PyObject* object_;
};

// Names of the backends' methods, made once.
struct Names {
  PyObject *take, *put, *position, *same, *get_offset, *known, *streams;
} names;

// The package's own backends; every other one is asked through its methods.
PyObject *cpu_backend = nullptr, *cuda_backend = nullptr;

bool cpu_bound = false;  // a CPU stream is bound to the default generator, so handles do not tell where it stands

enum class Kind { cpu, cuda, other };

Kind kind_of(PyObject* backend, PyObject* handle, at::Generator*& generator) {
  // Exactly this class: what a subclass may do is not known here.
  if (reinterpret_cast<PyObject*>(Py_TYPE(handle)) != THPGeneratorClass) return Kind::other;
  generator = &reinterpret_cast<THPGenerator*>(handle)->cdata;
  if (backend == cuda_backend && generator->device().is_cuda()) return Kind::cuda;
  if (backend == cpu_backend && generator->device().is_cpu() && !cpu_bound) return Kind::cpu;
  return Kind::other;
}

// ------------------------------------------------------------------------------------------------- one stream

PyObject* take_cpu(at::Generator& generator) {
  PyObject* value = PyBytes_FromStringAndSize(nullptr, sizeof(Twister));
  if (value == nullptr) return nullptr;
  Twister twister;
  read(cpu_of(generator), twister);
  std::memcpy(PyBytes_AsString(value), &twister, sizeof(Twister));
  return value;
}

bool is_twister(PyObject* value) { return PyBytes_Check(value) && PyBytes_Size(value) == Py_ssize_t(sizeof(Twister)); }

void put_cpu(at::Generator& generator, PyObject* value) {
  Twister twister;
  std::memcpy(&twister, PyBytes_AsString(value), sizeof(Twister));
  write(cpu_of(generator), twister);
}

PyObject* take_one(Cuda& cuda, PyObject* backend, PyObject* handle) {
  at::Generator* generator = nullptr;
  const Kind kind = kind_of(backend, handle, generator);
  if (kind == Kind::cpu) return take_cpu(*generator);
  Philox state;
  if (kind == Kind::cuda && cuda.read(*generator, state)) {
    Ref seed(PyLong_FromUnsignedLongLong(state.seed)), offset(PyLong_FromUnsignedLongLong(state.offset));
    return seed && offset ? PyTuple_Pack(2, seed.get(), offset.get()) : nullptr;
  }
  return PyObject_CallMethodObjArgs(backend, names.take, handle, nullptr);
}

bool put_one(Cuda& cuda, PyObject* backend, PyObject* handle, PyObject* value) {
  at::Generator* generator = nullptr;
  const Kind kind = kind_of(backend, handle, generator);
  if (kind == Kind::cpu && is_twister(value)) {
    put_cpu(*generator, value);
    return true;
  }
  if (kind == Kind::cuda) {
    PyObject *seed = PyTuple_GetItem(value, 0), *offset = seed == nullptr ? nullptr : PyTuple_GetItem(value, 1);
    if (offset == nullptr) return false;
    const Philox state = {PyLong_AsUnsignedLongLong(seed), PyLong_AsUnsignedLongLong(offset)};
    if (PyErr_Occurred() != nullptr) return false;
    if (cuda.write(*generator, state)) return true;
  }
  return bool(Ref(PyObject_CallMethodObjArgs(backend, names.put, handle, value, nullptr)));
}

PyObject* position_of(Cuda& cuda, PyObject* backend, PyObject* handle) {
  at::Generator* generator = nullptr;
  const Kind kind = kind_of(backend, handle, generator);
  if (kind == Kind::cpu) return take_cpu(*generator);
  Philox state;
  if (kind == Kind::cuda && cuda.read(*generator, state)) return PyLong_FromUnsignedLongLong(state.offset);
  return PyObject_CallMethodObjArgs(backend, names.position, handle, nullptr);
}

// ------------------------------------------------------------------------------------------------- sets of streams

// A stream of a recording: (name, backend, handle, value), see rng/recording.py. Borrowed references.
struct Stream {
  PyObject *name, *backend, *handle, *value;
};

bool stream_at(PyObject* streams, Py_ssize_t i, Stream& stream) {
  PyObject* entry = PyList_GetItem(streams, i);
  if (entry == nullptr || !PyTuple_Check(entry) || PyTuple_Size(entry) != 4) {
    if (PyErr_Occurred() == nullptr) PyErr_SetString(PyExc_TypeError, "a stream is a tuple of name, backend, handle and value");
    return false;
  }
  stream = {PyTuple_GetItem(entry, 0), PyTuple_GetItem(entry, 1), PyTuple_GetItem(entry, 2), PyTuple_GetItem(entry, 3)};
  return true;
}

bool expects(const char* what, Py_ssize_t given, Py_ssize_t wanted, PyObject* const* args, int lists) {
  bool right = given == wanted;
  for (int i = 0; right && i < lists; ++i) right = PyList_Check(args[i]);
  if (!right) PyErr_SetString(PyExc_TypeError, what);
  return right;
}

PyObject* take(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (!expects("take(backend, handle)", count, 2, args, 0)) return nullptr;
  Cuda cuda;
  return take_one(cuda, args[0], args[1]);
}

PyObject* positions(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (!expects("positions(streams: list)", count, 1, args, 1)) return nullptr;
  const Py_ssize_t size = PyList_Size(args[0]);
  Ref found(PyList_New(size));
  Cuda cuda;
  for (Py_ssize_t i = 0; found && i < size; ++i) {
    Stream stream;
    if (!stream_at(args[0], i, stream)) return nullptr;
    PyObject* position = position_of(cuda, stream.backend, stream.handle);
    if (position == nullptr || PyList_SetItem(found.get(), i, position) != 0) return nullptr;
  }
  return found.release();
}

PyObject* retake(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (!expects("retake(streams: list)", count, 1, args, 1)) return nullptr;
  const Py_ssize_t size = PyList_Size(args[0]);
  Ref found(PyList_New(size));
  Cuda cuda;
  for (Py_ssize_t i = 0; found && i < size; ++i) {
    Stream stream;
    if (!stream_at(args[0], i, stream)) return nullptr;
    Ref value(take_one(cuda, stream.backend, stream.handle));
    PyObject* entry = value ? PyTuple_Pack(4, stream.name, stream.backend, stream.handle, value.get()) : nullptr;
    if (entry == nullptr || PyList_SetItem(found.get(), i, entry) != 0) return nullptr;
  }
  return found.release();
}

PyObject* rewind(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (!expects("rewind(streams: list)", count, 1, args, 1)) return nullptr;
  Cuda cuda;
  for (Py_ssize_t i = PyList_Size(args[0]) - 1; i >= 0; --i) {
    Stream stream;
    if (!stream_at(args[0], i, stream) || !put_one(cuda, stream.backend, stream.handle, stream.value)) return nullptr;
  }
  Py_RETURN_NONE;
}

PyObject* stand_where(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (!expects("stand_where(streams: list, ends: list, reached: list)", count, 3, args, 3)) return nullptr;
  const Py_ssize_t size = PyList_Size(args[0]);
  if (PyList_Size(args[1]) != size || PyList_Size(args[2]) != size) {
    PyErr_SetString(PyExc_ValueError, "stand_where() takes lists of equal length");
    return nullptr;
  }
  for (Py_ssize_t i = 0; i < size; ++i) {
    Stream stream;
    if (!stream_at(args[0], i, stream)) return nullptr;
    PyObject *end = PyList_GetItem(args[1], i), *reached = PyList_GetItem(args[2], i);
    int same;
    if ((PyLong_Check(end) && PyLong_Check(reached)) || (is_twister(end) && is_twister(reached))) {
      same = PyObject_RichCompareBool(end, reached, Py_EQ);
    } else {
      Ref answer(PyObject_CallMethodObjArgs(stream.backend, names.same, end, reached, nullptr));
      same = answer ? PyObject_IsTrue(answer.get()) : -1;
    }
    if (same < 0) return nullptr;
    if (same == 0) Py_RETURN_FALSE;
  }
  Py_RETURN_TRUE;
}

// touch() of rng/recording.py where it needs no more than the streams that are moved here: False, and nothing has changed,
// where it does. Under graph capture torch refuses to read a stream, so that the check of its registration is not skipped.
PyObject* touch(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (!expects("touch(recordings: list, name, handle)", count, 3, args, 1)) return nullptr;
  PyObject *recordings = args[0], *name = args[1], *handle = args[2];
  Ref key(PyLong_FromVoidPtr(handle));
  if (!key) return nullptr;
  PyObject* backend = nullptr;
  Ref entry;
  Cuda cuda;
  for (Py_ssize_t i = PyList_Size(recordings) - 1; i >= 0; --i) {
    PyObject* recording = PyList_GetItem(recordings, i);
    Ref noted(PyObject_GetAttr(recording, names.known));
    const int is_known = noted ? PySet_Contains(noted.get(), key.get()) : -1;
    if (is_known < 0) return nullptr;
    if (is_known == 1) break;
    if (!entry) {
      at::Generator* generator = nullptr;
      backend = cuda_backend;
      Kind kind = kind_of(backend, handle, generator);
      if (kind == Kind::other) kind = kind_of(backend = cpu_backend, handle, generator);
      Philox state;
      if (kind == Kind::other || (kind == Kind::cuda && !cuda.read(*generator, state))) Py_RETURN_FALSE;
      Ref value(take_one(cuda, backend, handle));
      if (!value) return nullptr;
      entry = PyTuple_Pack(4, name, backend, handle, value.get());
      if (!entry) return nullptr;
    }
    Ref streams(PyObject_GetAttr(recording, names.streams));
    if (!streams || PyList_Append(streams.get(), entry.get()) != 0 || PySet_Add(noted.get(), key.get()) != 0) return nullptr;
  }
  Py_RETURN_TRUE;
}

PyObject* set_backends(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (!expects("set_backends(cpu, cuda)", count, 2, args, 0)) return nullptr;
  Ref before(cpu_backend), too(cuda_backend);
  cpu_backend = Py_NewRef(args[0]);
  cuda_backend = Py_NewRef(args[1]);
  Py_RETURN_NONE;
}

// The default generator's value goes into one generator, and another one's becomes the default generator's.
PyObject* swap_cpu(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (!expects("swap_cpu(default, into, out_of)", count, 3, args, 0)) return nullptr;
  std::array<at::CPUGeneratorImpl*, 3> impls;
  for (size_t i = 0; i < 3; ++i) {
    if (PyObject_IsInstance(args[i], THPGeneratorClass) != 1 ||
        !reinterpret_cast<THPGenerator*>(args[i])->cdata.device().is_cpu()) {
      PyErr_SetString(PyExc_TypeError, "swap_cpu() takes three CPU generators");
      return nullptr;
    }
    impls[i] = &cpu_of(reinterpret_cast<THPGenerator*>(args[i])->cdata);
  }
  Twister twister;
  read(*impls[0], twister);
  write(*impls[1], twister);
  read(*impls[2], twister);
  write(*impls[0], twister);
  Py_RETURN_NONE;
}

PyObject* unpack_cpu(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (!expects("unpack_cpu(generator, value)", count, 2, args, 0)) return nullptr;
  at::Generator* generator = nullptr;
  if (PyObject_IsInstance(args[0], THPGeneratorClass) == 1) generator = &reinterpret_cast<THPGenerator*>(args[0])->cdata;
  if (generator == nullptr || !generator->device().is_cpu() || !is_twister(args[1])) {
    PyErr_SetString(PyExc_TypeError, "unpack_cpu() takes a CPU generator and what take() returned for one");
    return nullptr;
  }
  put_cpu(*generator, args[1]);
  Py_RETURN_NONE;
}

PyObject* mark(PyObject*, PyObject* clock) {
  Philox state = {0, 0};
  Cuda cuda;
  at::Generator* generator = nullptr;
  if (clock != Py_None && (kind_of(cuda_backend, clock, generator) != Kind::cuda || !cuda.read(*generator, state))) {
    Ref offset(PyObject_CallMethodObjArgs(clock, names.get_offset, nullptr));
    if (!offset) return nullptr;
    state.offset = PyLong_AsUnsignedLongLong(offset.get());
    if (PyErr_Occurred() != nullptr) return nullptr;
  }
  Ref number(PyLong_FromUnsignedLongLong(at::sequence_number::peek())), offset(PyLong_FromUnsignedLongLong(state.offset));
  return number && offset ? PyTuple_Pack(2, number.get(), offset.get()) : nullptr;
}

PyObject* bind_cpu(PyObject*, PyObject* bound) {
  const int truth = PyObject_IsTrue(bound);
  if (truth < 0) return nullptr;
  cpu_bound = truth == 1;
  Py_RETURN_NONE;
}

// ------------------------------------------------------------------------------------------------- settings

c10::DeviceType accelerator = c10::DeviceType::CPU;

PyObject* set_accelerator(PyObject*, PyObject* name) {
  Ref bytes(PyUnicode_AsUTF8String(name));
  const char* text = bytes ? PyBytes_AsString(bytes.get()) : nullptr;
  if (text == nullptr) return nullptr;
  try {
    accelerator = c10::Device(text).type();
  } catch (const std::exception&) {
    PyErr_Format(PyExc_ValueError, "unknown device type %R", name);
    return nullptr;
  }
  Py_RETURN_NONE;
}

// The settings of recompute/ambient.py as bytes: equal bytes, equal settings.
PyObject* ambient(PyObject*, PyObject*) {
  const at::Context& context = at::globalContext();
  std::array<char, 12 + at::num_sdp_backends> key = {
      char(at::autocast::is_autocast_enabled(c10::DeviceType::CPU)),
      char(at::autocast::get_autocast_dtype(c10::DeviceType::CPU)),
      char(at::autocast::is_autocast_enabled(accelerator)),
      char(at::autocast::get_autocast_dtype(accelerator)),
      char(at::autocast::is_autocast_cache_enabled()),
      char(c10::get_default_dtype_as_scalartype()),
      char(context.userEnabledFlashSDP()),
      char(context.userEnabledMemEfficientSDP()),
      char(context.userEnabledMathSDP()),
      char(context.userEnabledCuDNNSDP()),
      char(context.userEnabledOverrideableSDP()),
      char(context.userEnabledCuDNN())};
  size_t place = 12;
  for (const at::SDPBackend backend : at::globalContext().sDPPriorityOrder()) key[place++] = char(backend);
  return PyBytes_FromStringAndSize(key.data(), Py_ssize_t(key.size()));
}

template <class Function>
PyCFunction function(Function* pointer) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(pointer));
}

PyMethodDef methods[] = {
    {"take", function(&take), METH_FASTCALL, "take(backend, handle): the stream's value, as the backend takes it"},
    {"positions", function(&positions), METH_FASTCALL, "positions(streams): where each stream stands now"},
    {"retake", function(&retake), METH_FASTCALL, "retake(streams): the streams with the values that they have now"},
    {"rewind", function(&rewind), METH_FASTCALL, "rewind(streams): write their values, the last one first"},
    {"stand_where", function(&stand_where), METH_FASTCALL, "stand_where(streams, ends, reached): all positions equal?"},
    {"touch", function(&touch), METH_FASTCALL, "touch(recordings, name, handle): note a stream; False: not done here"},
    {"swap_cpu", function(&swap_cpu), METH_FASTCALL, "swap_cpu(default, into, out_of): exchange what the first one holds"},
    {"unpack_cpu", function(&unpack_cpu), METH_FASTCALL, "unpack_cpu(generator, value): write a taken value, bound or not"},
    {"mark", &mark, METH_O, "mark(clock): autograd's sequence number, and the stream's offset (0 for None)"},
    {"set_backends", function(&set_backends), METH_FASTCALL, "set_backends(cpu, cuda): whose streams are moved here"},
    {"bind_cpu", &bind_cpu, METH_O, "bind_cpu(bound): say whether a CPU stream is bound to the default generator"},
    {"ambient", &ambient, METH_NOARGS, "ambient(): the settings that a recompute shares with its forward, as bytes"},
    {"set_accelerator", &set_accelerator, METH_O, "set_accelerator(name): whose autocast settings count, beside the CPU's"},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "transformer_engine_ext_streams", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_transformer_engine_ext_streams() {
  names = {
      PyUnicode_InternFromString("take"), PyUnicode_InternFromString("put"), PyUnicode_InternFromString("position"),
      PyUnicode_InternFromString("same"), PyUnicode_InternFromString("get_offset"), PyUnicode_InternFromString("known"),
      PyUnicode_InternFromString("streams")};
  return PyModule_Create(&definition);
}
