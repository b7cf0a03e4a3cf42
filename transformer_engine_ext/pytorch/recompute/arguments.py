# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Tensors inside arguments and results: taken out of nested containers, and put back."""

from __future__ import annotations

import collections
import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import Any

from torch import Tensor
from torch.nn import Module
from torch.utils import _pytree as pytree

from transformer_engine_ext.errors import CheckpointArgumentError

__all__ = ["ONE_TENSOR", "PackedCall", "TensorList", "hidden_tensor", "pack", "pack_call", "unpack", "unpack_call"]

#: None: all arguments are positional, and tensors, each another one.
PackedCall = tuple[list[Any], dict[str, Any]] | None

# An own walk, since torch's pytree costs about 50 us per region on flat arguments and leaves cyclic garbage behind.
# Types registered with it are still taken apart by it.


class _Slot:
    """Place of one tensor."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


#: A value that is one tensor, packed.
ONE_TENSOR = _Slot(0)


class _Node:
    """A container with tensors in it: its packed children, and how to build it again from unpacked ones."""

    __slots__ = ("build", "children")

    def __init__(self, children: list[Any], build: Callable[[list[Any]], Any]) -> None:
        self.children = children
        self.build = build


# Rebuilt for every recompute even without tensors in them: the function may change those that it gets.
_CHANGEABLE = frozenset((list, dict, collections.OrderedDict, collections.defaultdict, collections.deque))
_ATOMS = frozenset((type(None), bool, int, float, str, bytes, complex))


class TensorList(list[Tensor]):
    """The tensors of a value in order, each once: an object that is passed twice stays one object in the recompute."""

    def place(self, tensor: Tensor) -> int:
        """Return the index of a tensor, which is appended if it is new."""
        places = self._places
        index = places.get(id(tensor))
        if index is None:
            index = places[id(tensor)] = len(self)
            self.append(tensor)
        return index

    def __init__(self) -> None:
        self._places: dict[int, int] = {}

    def cut(self, length: int) -> None:
        """Forget the tensors from ``length`` on."""
        for tensor in self[length:]:
            del self._places[id(tensor)]
        del self[length:]


def pack(value: Any, tensors: TensorList) -> Any:
    """Take the tensors out of a value.

    Parameters
    ----------
    value : object
        A tensor, or a tuple, list, dict, named tuple, dataclass, or type registered with torch's pytree, to any depth.
        Other objects are opaque: they stay as they are, with the tensors that they may hold.
    tensors : TensorList
        Receives the tensors.

    Returns
    -------
    object
        What ``unpack`` takes. It holds no tensor that went to ``tensors``.

    Raises
    ------
    CheckpointArgumentError
        For an iterator, which a recompute would find used up.
    """
    kind = type(value)
    if kind in _ATOMS:
        return value
    if isinstance(value, Tensor):
        return _Slot(tensors.place(value))
    parts = _take_apart(value, kind)
    if parts is None:
        return value
    items, make_build = parts
    before = len(tensors)
    children = [pack(item, tensors) for item in items]
    if kind not in _CHANGEABLE and not any(type(child) in (_Slot, _Node) for child in children):
        return value  # nothing to rebuild: it stays the same object in forward and recompute
    build = make_build()  # See Note [The caller's objects are never written to]
    if build is None:
        tensors.cut(before)
        return value
    return _Node(children, build)


def unpack(packed: Any, tensors: Sequence[Tensor]) -> Any:
    """Build a value again.

    Parameters
    ----------
    packed : object
        What ``pack`` returned.
    tensors : sequence of torch.Tensor
        The tensors to put in, in order.
    """
    kind = type(packed)
    if kind is _Slot:
        return tensors[packed.index]
    if kind is _Node:
        return packed.build([unpack(child, tensors) for child in packed.children])
    return packed


def pack_call(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[PackedCall, Sequence[Tensor]]:
    """Take the tensors out of a call's arguments; return what ``unpack_call`` takes, and the tensors in order."""
    if not kwargs:
        for arg in args:
            if type(arg) is not Tensor:
                break
        else:
            if len(args) == 1 or len({id(arg) for arg in args}) == len(args):
                return None, args
    tensors = TensorList()
    try:
        packed = [pack(arg, tensors) for arg in args], {key: pack(arg, tensors) for key, arg in kwargs.items()}
    except RecursionError:
        raise CheckpointArgumentError(
            "an argument of the checkpointed function is nested too deeply to look for tensors in it, or a list, dict "
            "or dataclass contains itself. Keep such an object in the function's closure, or pass the tensors beside it"
        ) from None
    return packed, tensors


def unpack_call(packed: PackedCall, tensors: Sequence[Tensor]) -> tuple[Sequence[Any], dict[str, Any]]:
    """Build a call's positional and keyword arguments again, around ``tensors``."""
    if packed is None:
        return tensors, {}
    args, kwargs = packed
    return [unpack(arg, tensors) for arg in args], {key: unpack(arg, tensors) for key, arg in kwargs.items()}


def hidden_tensor(packed: Any) -> str | None:
    """Return where an opaque object of a packed value holds a tensor that could need a gradient, or None."""
    kind = type(packed)
    if kind is _Node:
        found = (hidden_tensor(child) for child in packed.children)
        return next((name for name in found if name is not None), None)
    if kind in _ATOMS or kind is _Slot or isinstance(packed, (type, Module)):
        return None
    held = dict(getattr(packed, "__dict__", {}))
    for owner in kind.__mro__:
        slots = owner.__dict__.get("__slots__", ())
        held |= {name: getattr(packed, name, None) for name in ((slots,) if isinstance(slots, str) else slots)}
    if isinstance(packed, (tuple, list, set, frozenset)):
        held |= {f"[{number}]": item for number, item in enumerate(packed)}
    for name, value in held.items():
        if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()):
            return f"{kind.__name__}.{name}"
    return None


Build = Callable[[list[Any]], Any]


# Note [The caller's objects are never written to]
# What a recompute gets is built around copies, and a copy is made only where there is a tensor (or a list or dict) to
# put in: copying may run any code of the user's. A class whose copy is the object itself stays opaque.
def _take_apart(value: Any, kind: type) -> tuple[list[Any], Callable[[], Build | None]] | None:
    if kind is tuple:
        return list(value), lambda: tuple
    if kind is list:
        return list(value), lambda: list
    if kind is dict:
        keys = list(value)
        return list(value.values()), lambda: lambda items: dict(zip(keys, items, strict=True))
    if isinstance(value, tuple) and hasattr(kind, "_make"):
        return list(value), lambda: kind._make
    node = pytree.SUPPORTED_NODES.get(kind)
    if node is not None:
        children, context = node.flatten_fn(value)
        return list(children), lambda: lambda items: node.unflatten_fn(items, context)
    if isinstance(value, Enum):
        return None
    if dataclasses.is_dataclass(kind):
        names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        return [getattr(value, name) for name in names], lambda: _copier(value, names, object.__setattr__)
    if isinstance(value, (dict, collections.UserDict)):
        mapping_keys = list(value)
        write = dict.__setitem__ if isinstance(value, dict) else collections.UserDict.__setitem__
        return [value[key] for key in mapping_keys], lambda: _copier(value, mapping_keys, write)
    if isinstance(value, Iterator) and not hasattr(value, "read"):
        raise CheckpointArgumentError(
            f"an argument or result of the checkpointed function is an iterator ({kind.__name__}): its first user uses "
            "it up, so forward and recompute, or caller, would see different items. Pass a list or tuple"
        )
    return None


def _copier(value: Any, names: list[Any], write: Callable[[Any, Any, Any], None]) -> Build | None:
    """Return what builds a copy of ``value`` with other items, or None if it cannot be copied."""
    # Not through the constructor, which may do anything.
    try:
        outline = copy.copy(value)
    except Exception as error:
        raise CheckpointArgumentError(
            f"an argument or result of the checkpointed function, a {type(value).__name__} with a tensor in it, cannot "
            f"be copied for the recompute: copy.copy raised {type(error).__name__}: {error}. Pass the tensors beside "
            "it, or register the class with torch.utils._pytree.register_pytree_node"
        ) from error
    if outline is value:
        return None
    for name in names:
        write(outline, name, None)

    def build(items: list[Any]) -> Any:
        twin = copy.copy(outline)
        for name, item in zip(names, items, strict=True):
            write(twin, name, item)
        return twin

    return build
