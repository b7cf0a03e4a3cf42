# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Reading files of ``torch.save`` without running anything that they name, and without loading their weights."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections import OrderedDict
from typing import IO, Any, cast

import numpy as np

from transformer_engine_ext.errors import StateFormatError

__all__ = ["Record", "Storage", "as_array", "as_bytes", "describe", "load_plain", "load_zip"]

#: Element types of the storages that random-number states come in, by the class that a file names.
_DTYPES = {
    "ByteStorage": np.uint8,
    "UntypedStorage": np.uint8,
    "CharStorage": np.int8,
    "IntStorage": np.int32,
    "LongStorage": np.int64,
    "FloatStorage": np.float32,
    "DoubleStorage": np.float64,
    "HalfStorage": np.float16,
}
#: Nothing that holds random-number states is larger; a file that says so is not read into memory.
_MAX_BYTES = 1 << 28


# Note [Unpickling without running anything]
# A pickle is a program: it may call whatever it can name. Here no name is ever looked up. Each becomes a new, empty
# class derived from Record, so "calling" one stores its arguments, and what the file holds is read off these records
# afterwards. Only OrderedDict and set are real, since they do nothing but hold. Storages stay in the file until
# somebody asks for their bytes, so a checkpoint of any size opens at once, whatever device it was saved from.
class Record:
    """Stands for an object of a class that is not imported: its name, how it was made, and the state it was given."""

    module = ""
    name = ""
    args: tuple[Any, ...]
    state: Any
    items: list[tuple[Any, Any]]
    elements: list[Any]

    def __new__(cls, *args: Any, **kwargs: Any) -> Record:  # noqa: D102
        # Not in __init__, which a pickle need not call.
        record = object.__new__(cls)
        record.args, record.state, record.items, record.elements = args, None, [], []
        return record

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items.append((key, value))

    def append(self, element: Any) -> None:
        """Take part in pickle's way of filling lists."""
        self.elements.append(element)

    def add(self, element: Any) -> None:
        """Take part in pickle's way of filling sets."""
        self.elements.append(element)

    def extend(self, elements: Any) -> None:
        """Take part in pickle's way of filling lists."""
        self.elements.extend(elements)

    def field(self, name: str, default: Any = None) -> Any:
        """Return a field of the state, where that is a dictionary."""
        return self.state.get(name, default) if isinstance(self.state, dict) else default


class Storage:
    """The bytes of a tensor, still in the file."""

    def __init__(self, archive: zipfile.ZipFile, entry: str, dtype: str) -> None:
        self._archive, self._entry, self.dtype = archive, entry, dtype

    def read(self) -> bytes:
        """Return the bytes."""
        return _read_entry(self._archive, self._entry)


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: IO[bytes], archive: zipfile.ZipFile | None = None, prefix: str = "") -> None:
        super().__init__(stream)
        self._archive, self._prefix = archive, prefix
        self._classes: dict[tuple[str, str], type] = {}

    def find_class(self, module: str, name: str) -> Any:
        # See Note [Unpickling without running anything]
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) in (("builtins", "set"), ("__builtin__", "set")):
            return set
        if (module, name) not in self._classes:
            self._classes[module, name] = type(name, (Record,), {"module": module, "name": name})
        return self._classes[module, name]

    def persistent_load(self, pid: Any) -> Any:
        if self._archive is None or not isinstance(pid, tuple) or len(pid) < 3 or pid[0] != "storage":
            raise pickle.UnpicklingError("a reference to something outside of the file")
        return Storage(self._archive, f"{self._prefix}data/{pid[2]}", str(getattr(pid[1], "name", pid[1])))


def _read_entry(archive: zipfile.ZipFile, entry: str) -> bytes:
    info = archive.getinfo(entry)
    if info.file_size > _MAX_BYTES:
        raise pickle.UnpicklingError(f"entry {entry!r} has {info.file_size} bytes, more than any random-number state")
    return archive.read(entry)


def _load(unpickler: _Unpickler, where: str) -> Any:
    try:
        return unpickler.load()
    except Exception as error:  # a damaged pickle fails in whatever way it likes
        raise StateFormatError(f"{where}: this cannot be read as a pickle ({error!r}); the file is damaged") from error


def load_plain(data: bytes, where: str) -> Any:
    """Read a pickle.

    Raises
    ------
    StateFormatError
        If it is none, or is damaged.
    """
    return _load(_Unpickler(io.BytesIO(data)), where)


def load_zip(source: str | os.PathLike[str] | IO[bytes], where: str) -> Any:
    """Read what ``torch.save`` wrote.

    Raises
    ------
    OSError
        If the file cannot be opened.
    StateFormatError
        If it is no such file, is damaged, or older than torch 1.6.
    """
    try:
        archive = zipfile.ZipFile(source)
        entry = next(name for name in archive.namelist() if name == "data.pkl" or name.endswith("/data.pkl"))
        data = _read_entry(archive, entry)
    except OSError:
        raise
    except Exception as error:  # zipfile lets through whatever a damaged directory leads to
        raise StateFormatError(
            f"{where}: not written by torch.save of torch 1.6 or newer, or damaged ({error!r})"
        ) from error
    return _load(_Unpickler(io.BytesIO(data), archive, entry.removesuffix("data.pkl")), where)


def _is(value: Any, *names: str) -> bool:
    return isinstance(value, Record) and value.name in names


def as_array(value: Any, where: str) -> Any:
    """Return a numpy array, from the record of a numpy array or of a contiguous tensor.

    Raises
    ------
    StateFormatError
        If it is neither, or of a kind that random-number states never have.
    """
    try:
        if _is(value, "_rebuild_tensor_v2", "_rebuild_tensor"):
            storage, offset, size = value.args[:3]
            dtype = np.dtype(_DTYPES[cast(Storage, storage).dtype])
            count = int(np.prod(size, dtype=np.int64))
            return np.frombuffer(storage.read(), dtype, count, int(offset) * dtype.itemsize).reshape(size)
        if _is(value, "_reconstruct"):
            _, size, kind, _, data = value.state
            return np.frombuffer(as_bytes(data, where), _numpy_dtype(kind)).reshape(size)
        if _is(value, "scalar"):
            return np.frombuffer(as_bytes(value.args[1], where), _numpy_dtype(value.args[0]))[0]
    except (StateFormatError, OSError):
        raise
    except Exception as error:  # as above
        raise StateFormatError(f"{where}: no array that can be read ({error!r})") from error
    raise StateFormatError(f"{where}: expected an array, got {describe(value)}")


def _numpy_dtype(record: Any) -> Any:
    code = str(record.args[0])
    if code[:1] not in "uif" or not code[1:].isdigit():
        raise ValueError(f"array elements of type {code!r}")
    order = record.state[1] if isinstance(record.state, tuple) and len(record.state) > 1 else "<"
    return np.dtype(code).newbyteorder(">" if order == ">" else "<")


def as_bytes(value: Any, where: str) -> bytes:
    """Return bytes: as they are, as old protocols write them (a call of ``_codecs.encode``), or of an array."""
    if isinstance(value, bytes):
        return value
    if _is(value, "encode") and value.module == "_codecs":
        return str(value.args[0]).encode("latin-1")
    if _is(value, "bytes", "bytearray"):
        return bytes(value.args[0]) if value.args and isinstance(value.args[0], bytes) else b""
    data: bytes = as_array(value, where).tobytes()
    return data


def describe(value: Any) -> str:
    """Return what a value is, for messages."""
    return f"{value.module}.{value.name}" if isinstance(value, Record) else type(value).__name__
