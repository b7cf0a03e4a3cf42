# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Replacing functions and class attributes in place, so that every holder is reached, and putting them back."""

from __future__ import annotations

import inspect
import itertools
import types
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from transformer_engine_ext.errors import PatchError

__all__ = ["AttributeSwap", "CodeSwap", "original_of", "plain_function"]

_KEY = "which replacement"
_MISSING = object()
_numbers = itertools.count(1)

#: Key in a replaced function's code to what runs instead.
REPLACEMENTS: dict[str, Callable[..., Any]] = {}


# The code below is put into functions of other modules, so it has to find everything by itself; torch.compile, which
# traces into such functions, understands an import and a string, but no function among the constants of a code.
def _call(*args: Any, **kwargs: Any) -> Any:
    from transformer_engine_ext.integrations.swapping import REPLACEMENTS

    return REPLACEMENTS["which replacement"](*args, **kwargs)


def _generate(*args: Any, **kwargs: Any) -> Any:
    from transformer_engine_ext.integrations.swapping import REPLACEMENTS

    return (yield from REPLACEMENTS["which replacement"](*args, **kwargs))


def plain_function(value: Any) -> types.FunctionType:
    """Return the function behind decorators that keep ``__wrapped__`` (``contextmanager``, dynamo's).

    Raises
    ------
    PatchError
        If there is no Python function.
    """
    inner = inspect.unwrap(value) if callable(value) else value
    if not isinstance(inner, types.FunctionType):
        raise PatchError(f"is a {type(value).__name__}, not a Python function")
    return inner


# Note [Functions keep their identity]
# A replaced function keeps its object and gets other code. So every copy is reached: names that other modules bound at
# import, imports inside functions, a user's own `from ... import`, partials, and bound methods that a module kept when
# it was built; and undoing it reaches all of them too, also those bound while it was replaced. Replacing names instead
# would have to find every holder, and would miss most of the last three kinds.
class CodeSwap:
    """One function that runs another one's body.

    Parameters
    ----------
    function : types.FunctionType
        What is called.
    replacement : callable
        What runs instead, with the same arguments; a generator function if ``function`` is one.

    Attributes
    ----------
    original : types.FunctionType
        A function with the replaced code.
    """

    def __init__(self, function: types.FunctionType, replacement: Callable[..., Any]) -> None:
        self.function = function
        code = function.__code__
        self.original = types.FunctionType(
            code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
        )
        self.original.__kwdefaults__ = function.__kwdefaults__
        self._code = code
        template = (_generate if code.co_flags & inspect.CO_GENERATOR else _call).__code__
        self._key = f"{function.__module__}.{function.__qualname__} {next(_numbers)}"
        self._replacement = replacement
        constants = tuple(
            self._key if isinstance(constant, str) and constant == _KEY else constant for constant in template.co_consts
        )
        self._ours = template.replace(
            co_consts=constants,
            co_freevars=code.co_freevars,  # Python asks for as many as the closure has
            co_name=code.co_name,
        )
        self._signed = False

    def apply(self) -> None:
        """Put the replacement in."""
        if "__signature__" not in vars(self.function):
            with suppress(TypeError, ValueError):
                self.function.__signature__ = inspect.signature(self.original)  # type: ignore[attr-defined]
                self._signed = True
        REPLACEMENTS[self._key] = self._replacement
        self.function.__code__ = self._ours

    def undo(self) -> str | None:
        """Put the original back; returns what was in the way, or None."""
        if self.function.__code__ is not self._ours:
            return "its code was replaced again by somebody else, and was left alone"
        self.function.__code__ = self._code
        # Its entry in REPLACEMENTS stays: another thread may be between the code and its look-up.
        if self._signed:
            with suppress(AttributeError):
                del self.function.__signature__  # type: ignore[attr-defined]
        return None


class AttributeSwap:
    """One attribute of a class.

    Parameters
    ----------
    owner : type
        The class, which keeps its identity.
    name : str
        The attribute.
    value : object
        Its new value.
    """

    def __init__(self, owner: type, name: str, value: Any) -> None:
        self.owner = owner
        self.name = name
        self.value = value
        self._before = vars(owner).get(name, _MISSING)

    def apply(self) -> None:
        """Put the value in."""
        setattr(self.owner, self.name, self.value)

    def undo(self) -> str | None:
        """Put the original back; returns what was in the way, or None."""
        if vars(self.owner).get(self.name, _MISSING) is not self.value:
            return "it was replaced again by somebody else, and was left alone"
        if self._before is _MISSING:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self._before)
        return None


def original_of(value: Any) -> Any:
    """Return the plain function of a method or function, or None."""
    with suppress(PatchError):
        return plain_function(value)
    return None
