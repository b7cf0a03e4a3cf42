# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Tensors inside arguments and results: taken out of nested containers, and put back."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn import Module
from torch.utils import _pytree as pytree

__all__ = ["PackedCall", "hidden_tensor", "pack", "pack_call", "unpack", "unpack_call"]

PackedCall = tuple[list[Any], dict[str, Any]]

# An own walk, since torch's pytree costs about 50 us per region on flat arguments and leaves cyclic garbage behind.
# Types registered with it are still taken apart by it.


class _Slot:
    """Place of one tensor."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


class _Node:
    """A container with tensors in it: its packed children, and how to build it again from unpacked ones."""

    __slots__ = ("build", "children")

    def __init__(self, children: list[Any], build: Callable[[list[Any]], Any]) -> None:
        self.children = children
        self.build = build


_CHANGEABLE = (list, dict)
_ATOMS = frozenset((type(None), bool, int, float, str, bytes, complex))


def pack(value: Any, tensors: list[Tensor]) -> Any:
    """Take the tensors out of a value.

    Parameters
    ----------
    value : object
        A tensor, or a tuple, list, dict, named tuple, dataclass, mapping, or type registered with torch's pytree, to
        any depth. Other objects are opaque: they stay as they are, with the tensors that they may hold.
    tensors : list of torch.Tensor
        Receives the tensors, in order.

    Returns
    -------
    object
        What ``unpack`` takes. It holds no tensor that went to ``tensors``.
    """
    kind = type(value)
    if kind in _ATOMS:
        return value
    if isinstance(value, Tensor):
        tensors.append(value)
        return _Slot(len(tensors) - 1)
    parts = _take_apart(value, kind)
    if parts is None:
        return value
    items, build = parts
    before = len(tensors)
    children = [pack(item, tensors) for item in items]
    # Lists and dicts are built anew for every recompute, as they are now: the function may change those it gets. Other
    # containers without tensors are handed on as they are, so that they stay the same objects.
    return _Node(children, build) if len(tensors) > before or kind in _CHANGEABLE else value


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


def pack_call(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[PackedCall, list[Tensor]]:
    """Take the tensors out of a call's arguments; return what ``unpack_call`` takes, and the tensors in order."""
    tensors: list[Tensor] = []
    return ([pack(arg, tensors) for arg in args], {key: pack(arg, tensors) for key, arg in kwargs.items()}), tensors


def unpack_call(packed: PackedCall, tensors: Sequence[Tensor]) -> tuple[list[Any], dict[str, Any]]:
    """Build a call's positional and keyword arguments again, around ``tensors``."""
    args, kwargs = packed
    return [unpack(arg, tensors) for arg in args], {key: unpack(arg, tensors) for key, arg in kwargs.items()}


def hidden_tensor(packed: Any) -> str | None:
    """Return the ``Class.attribute`` of a tensor inside an opaque object of a packed value, or None."""
    kind = type(packed)
    if kind is _Node:
        found = (hidden_tensor(child) for child in packed.children)
        return next((name for name in found if name is not None), None)
    if kind in _ATOMS or kind is _Slot or isinstance(packed, (type, Module)):
        return None
    for name, value in getattr(packed, "__dict__", {}).items():
        if isinstance(value, Tensor):
            return f"{kind.__name__}.{name}"
    return None


def _take_apart(value: Any, kind: type) -> tuple[list[Any], Callable[[list[Any]], Any]] | None:
    if kind is tuple:
        return list(value), tuple
    if kind is list:
        return list(value), list
    if kind is dict:
        keys = list(value)
        return list(value.values()), lambda items: dict(zip(keys, items, strict=True))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return list(value), lambda items: kind(*items)
    node = pytree.SUPPORTED_NODES.get(kind)
    if node is not None:
        children, context = node.flatten_fn(value)
        return list(children), lambda items: node.unflatten_fn(items, context)
    if dataclasses.is_dataclass(kind):
        names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        shell = _emptied(value, names)
        return [getattr(value, name) for name in names], lambda items: _filled(shell, names, items)
    if isinstance(value, Mapping) and hasattr(value, "__setitem__"):
        mapping_keys = list(value)
        outline = copy.copy(value)
        for key in mapping_keys:
            outline[key] = None
        return [value[key] for key in mapping_keys], lambda items: _mapped(outline, mapping_keys, items)
    return None


def _emptied(value: Any, names: list[str]) -> Any:
    return _filled(value, names, [None] * len(names))


def _filled(shell: Any, names: list[str], items: list[Any]) -> Any:
    # Not through the constructor: __init__ and __post_init__ may do anything, and a frozen class refuses assignment.
    twin = copy.copy(shell)
    for name, item in zip(names, items, strict=True):
        object.__setattr__(twin, name, item)
    return twin


def _mapped(outline: Any, keys: list[Any], items: list[Any]) -> Any:
    twin = copy.copy(outline)
    for key, item in zip(keys, items, strict=True):
        twin[key] = item
    return twin
