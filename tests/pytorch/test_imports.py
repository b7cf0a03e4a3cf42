# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Importing the package asks CUDA for nothing and imports neither Transformer Engine nor Megatron."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import transformer_engine_ext
from _helpers import REPO
from _source import PACKAGE

#: Run as a script with module names as arguments. Imports them one after the other and prints what it saw, one item a
#: line. The functions that it watches are Python and stand before any question to the driver, so this also finds them
#: with a torch that was built without CUDA; a question alone, without a context, already makes a later fork unsafe.
PROBE = """
import importlib, importlib.abc, inspect, sys

first, *others = sys.argv[1:]
current = first
seen = []

class Watch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name in ("transformer_engine", "transformer_engine_torch", "megatron"):
            seen.append(f"{current}: import of {name}")  # also where a try swallows the ImportError
        return None

sys.meta_path.insert(0, Watch())
importlib.import_module(first)
if "torch" in sys.modules:
    seen.append(f"{first}: import of torch")

import torch
watched = ["_lazy_init", "current_device", "device_count", "is_available"]
codes = {inspect.unwrap(getattr(torch.cuda, name)).__code__: name for name in watched}

def on_call(frame, event, argument):
    # By code object, since other modules of torch hold these functions under names of their own.
    if event == "call" and frame.f_code in codes:
        seen.append(f"{current}: torch.cuda.{codes[frame.f_code]}()")

sys.setprofile(on_call)
for current in others:
    importlib.import_module(current)
sys.setprofile(None)
print("\\n".join(seen))
"""


def modules() -> list[str]:
    """All modules of the package but ``__main__`` and what exists to name the other packages."""
    names = []
    for file in sorted(PACKAGE.rglob("*.py")):
        parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
        if "integrations" not in parts and parts[-1] != "__main__":
            names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return names


def side_effects(first: str, *others: str, path: Path | None = None) -> list[str]:
    """Import in a new interpreter that turns warnings into errors; return what the probe saw."""
    paths = [str(REPO), *([str(path)] if path else []), os.environ.get("PYTHONPATH", "")]
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROBE, first, *others],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return result.stdout.splitlines() if result.stdout.strip() else []


def test_import_is_free() -> None:
    # See Note [Import is free]
    assert "transformer_engine_ext.pytorch.rng.state" in modules()
    assert side_effects("transformer_engine_ext", *modules()) == []


PLANTED = {
    "engine": ("import transformer_engine.pytorch", "import of transformer_engine"),
    "megatron_core": ("import megatron.core", "import of megatron"),
    "question": ("import torch; torch.cuda.is_available()", "torch.cuda.is_available()"),
    "state": ("import torch; torch.cuda.get_rng_state()", "torch.cuda._lazy_init()"),
    "tensor": ("import torch; torch.ones(1, device='cuda')", "torch.cuda._lazy_init()"),
}


def test_planted_side_effects_are_seen(tmp_path: Path) -> None:
    (tmp_path / "planted_torch.py").write_text("import torch")
    for name, (code, _) in PLANTED.items():
        (tmp_path / f"planted_{name}.py").write_text(f"try:\n    {code}\nexcept Exception:\n    pass\n")
    seen = side_effects("planted_torch", *(f"planted_{name}" for name in PLANTED), path=tmp_path)
    assert "planted_torch: import of torch" in seen
    for name, (_, effect) in PLANTED.items():
        assert f"planted_{name}: {effect}" in seen


def test_a_planted_warning_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "planted.py").write_text("import warnings\nwarnings.warn('old')")
    with pytest.raises(AssertionError, match="UserWarning: old"):
        side_effects("planted", path=tmp_path)


def test_lazy_names() -> None:
    from transformer_engine_ext import pytorch

    for name in transformer_engine_ext.__all__:
        assert name in dir(transformer_engine_ext)
        assert getattr(transformer_engine_ext, name) is not None
    assert transformer_engine_ext.te_checkpoint is pytorch.te_checkpoint is pytorch.checkpoint
    assert transformer_engine_ext.CudaRNGStatesTracker is pytorch.CudaRNGStatesTracker
    assert transformer_engine_ext.distributed is pytorch.distributed
    with pytest.raises(AttributeError, match="no attribute 'te_chekpoint'; it has: CudaRNGStatesTracker"):
        transformer_engine_ext.te_chekpoint  # noqa: B018


def test_type_checkers_see_the_lazy_names() -> None:
    """The names under TYPE_CHECKING are those of the table; a type checker knows no others."""
    text = (PACKAGE / "__init__.py").read_text()
    block = text[text.index("if TYPE_CHECKING:") : text.index("__version__ =")]
    assert set(re.findall(r"import (\w+) as \1$", block, re.MULTILINE)) == set(transformer_engine_ext._LAZY)
    assert set(transformer_engine_ext.__all__) == {*transformer_engine_ext._LAZY, "__version__"}


def test_version_is_that_of_the_metadata() -> None:
    declared = re.search(r'^version = "([^"]+)"', (REPO / "pyproject.toml").read_text(), re.MULTILINE)
    assert declared is not None
    assert transformer_engine_ext.__version__ == declared.group(1)
