# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Imports of the package go one way, and only integrations/ names Transformer Engine and Megatron."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from _source import PACKAGE

# Note [Imports go one way]
# errors < rng < recompute < distributed < integrations < testing < cli: a module imports from its own layer and from
# those before it, also inside functions. rng knows nothing of torch.distributed, and only integrations names
# Transformer Engine or Megatron, so that each layer can be read, tested and used without the ones after it.
LAYERS = [
    "transformer_engine_ext.errors",
    "transformer_engine_ext.pytorch.rng",
    "transformer_engine_ext.pytorch.recompute",
    "transformer_engine_ext.pytorch",  # its __init__ only: the names of the two layers before it
    "transformer_engine_ext.pytorch.distributed",
    "transformer_engine_ext.integrations",
    "transformer_engine_ext",  # its __init__ only
    "transformer_engine_ext.testing",  # for users' tests: nothing imports it
    "transformer_engine_ext.cli",
    "transformer_engine_ext.__main__",
]

#: The version is data that any layer may write into a file.
EVERYWHERE = "transformer_engine_ext.__version__"

#: Packages, and the one layer whose modules may import them.
RESERVED = dict.fromkeys(
    ["transformer_engine", "transformer_engine_torch", "megatron"], "transformer_engine_ext.integrations"
)

#: The layer, and what no module of it may import or reach as an attribute.
FORBIDDEN = {"transformer_engine_ext.pytorch.rng": "torch.distributed"}


def layer_of(module: str) -> str:
    """Return the longest layer name that `module` is or lies in; "" outside the package."""
    inside = [layer for layer in LAYERS if module == layer or module.startswith(layer + ".")]
    return max(inside, key=len, default="")


def module_name(file: Path, package: Path) -> str:
    parts = [package.name, *file.relative_to(package).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(tree: ast.AST, importer: str, is_package: bool, exists: set[str]) -> Iterator[tuple[int, str]]:
    """Yield line and absolute name of everything that a module imports, at any depth of nesting."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = importer.split(".")[: len(importer.split(".")) - node.level + is_package]
                base = ".".join([*parents, base] if base else parents)
            for alias in node.names:
                name = f"{base}.{alias.name}"
                # "from package import module" imports the module, "from module import name" only the module. Outside
                # of the package that can't be told apart, nor need it be.
                yield node.lineno, base if layer_of(base) and name not in exists | {EVERYWHERE} else name
        elif isinstance(node, ast.Call) and node.args:
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            argument = node.args[0]
            if called in ("import_module", "__import__") and isinstance(argument, ast.Constant):
                yield node.lineno, str(argument.value)


def violations(package: Path) -> list[str]:
    """Return one line of text for every import in `package` that the note forbids."""
    files = {module_name(file, package): file for file in sorted(package.rglob("*.py"))}
    found = []
    for module, file in files.items():
        tree = ast.parse(file.read_text(), str(file))
        own = layer_of(module)
        where = f"{file.relative_to(package.parent)}"
        for line, name in imported(tree, module, file.name == "__init__.py", set(files)):
            target = layer_of(name)
            if target and name != EVERYWHERE and LAYERS.index(target) > LAYERS.index(own):
                found.append(f"{where}:{line}: {own} imports {name}, of a later layer")
            if (keeper := RESERVED.get(name.split(".")[0], own)) != own:
                found.append(f"{where}:{line}: imports {name}, which only {keeper} may")
            if own in FORBIDDEN and f"{name}.".startswith(FORBIDDEN[own] + "."):
                found.append(f"{where}:{line}: {own} may not import {name}")
        if own in FORBIDDEN:
            found += [
                f"{where}:{node.lineno}: {own} may not use {FORBIDDEN[own]}"
                for node in ast.walk(tree)
                if isinstance(node, ast.Attribute) and ast.unparse(node) == FORBIDDEN[own]
            ]
    return found


def test_imports_go_one_way() -> None:
    # See Note [Imports go one way]
    found = violations(PACKAGE)
    assert not found, "\n".join(found)


def test_every_layer_has_modules() -> None:
    """A layer that was renamed would otherwise be checked no more."""
    modules = {layer_of(module_name(file, PACKAGE)) for file in PACKAGE.rglob("*.py")}
    assert modules == set(LAYERS)


PLANTED = [
    ("errors.py", "import transformer_engine_ext.pytorch.rng.state", "later layer"),
    ("pytorch/rng/state.py", "from transformer_engine_ext.pytorch.recompute import api", "later layer"),
    ("pytorch/rng/state.py", "from transformer_engine_ext.pytorch import recompute", "later layer"),
    ("pytorch/rng/state.py", "from transformer_engine_ext import pytorch", "later layer"),
    ("pytorch/rng/state.py", "from ..recompute import api", "later layer"),
    ("pytorch/rng/state.py", "def f():\n    from .. import recompute", "later layer"),
    ("pytorch/rng/__init__.py", "from ..recompute.api import x", "later layer"),
    ("pytorch/rng/state.py", "import_module('transformer_engine_ext.cli')", "later layer"),
    ("pytorch/rng/state.py", "import torch.distributed as dist", "may not import"),
    ("pytorch/rng/state.py", "from torch import distributed", "may not import"),
    ("pytorch/rng/state.py", "import torch\ntorch.distributed.get_rank()", "may not use"),
    ("pytorch/recompute/api.py", "def f():\n    import transformer_engine.pytorch", "which only"),
    (
        "cli/__init__.py",
        "try:\n    from megatron.core import tensor_parallel\nexcept ImportError:\n    pass",
        "which only",
    ),
]

ALLOWED = [
    ("pytorch/recompute/api.py", "from transformer_engine_ext.pytorch.rng import state"),
    ("pytorch/rng/state.py", "from transformer_engine_ext import __version__, errors"),
    ("pytorch/rng/state.py", "from . import devices\nfrom .devices import get_backend"),
    ("pytorch/recompute/saved_activations.py", "import torch.distributed"),
    ("integrations/megatron.py", "import megatron.core"),
    ("cli/__init__.py", "from transformer_engine_ext.pytorch import distributed"),
]


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """A package of the same names as ours, all modules empty."""
    package = tmp_path / "transformer_engine_ext"
    names = [
        "__init__",
        "errors",
        "pytorch/__init__",
        "pytorch/rng/__init__",
        "pytorch/rng/state",
        "pytorch/rng/devices",
    ]
    names += ["pytorch/recompute/__init__", "pytorch/recompute/api", "pytorch/recompute/saved_activations"]
    names += ["pytorch/distributed/__init__", "integrations/__init__", "integrations/megatron", "cli/__init__"]
    for name in names:
        file = package / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    return package


@pytest.mark.parametrize(("file", "code", "complaint"), PLANTED)
def test_a_planted_violation_is_found(planted: Path, file: str, code: str, complaint: str) -> None:
    (planted / file).write_text(code)
    assert any(complaint in line for line in violations(planted)), violations(planted)


@pytest.mark.parametrize(("file", "code"), ALLOWED)
def test_what_is_allowed_is_not_reported(planted: Path, file: str, code: str) -> None:
    (planted / file).write_text(code)
    assert violations(planted) == []
