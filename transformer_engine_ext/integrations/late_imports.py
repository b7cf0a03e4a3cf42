# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Doing something right after a module was imported, whenever that will be."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

__all__ = ["ImportWatch"]


class ImportWatch(importlib.abc.MetaPathFinder):
    """Calls a function after each of some modules was imported.

    Parameters
    ----------
    modules : sequence of str
        Absolute names of modules.
    after : callable
        Called with the name, once the module's code has run.
    """

    def __init__(self, modules: Sequence[str], after: Callable[[str], None]) -> None:
        self.modules = set(modules)
        self._after = after
        self._looking: set[str] = set()

    def start(self) -> None:
        """Watch from now on."""
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def stop(self) -> None:
        """Watch no more."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Let the other finders find the module, and wrap its loader."""
        if fullname not in self.modules or fullname in self._looking:
            return None
        spec: importlib.machinery.ModuleSpec | None
        self._looking.add(fullname)
        try:
            spec = self._found(fullname, path, target)
        finally:
            self._looking.discard(fullname)
        if spec is None:
            return None
        loader: Any = spec.loader
        if hasattr(loader, "exec_module"):
            run, after = loader.exec_module, self._after

            def exec_module(module: ModuleType) -> None:
                run(module)
                after(fullname)

            # On the instance: the loader stays what it is for pkgutil, inspect and tracebacks.
            loader.exec_module = exec_module
        return spec

    def _found(self, *asked: Any) -> Any:
        for finder in list(sys.meta_path):
            find = getattr(finder, "find_spec", None)
            spec = None if finder is self or find is None else find(*asked)
            if spec is not None:
                return spec
        return None
