# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Which versions are installed, whether they import, and whether they are known here."""

from __future__ import annotations

import importlib
import importlib.metadata
from types import ModuleType

from packaging.version import InvalidVersion, Version

__all__ = ["TESTED", "installed_version", "try_import", "version_note"]

#: Distribution to the lowest version that is looked for and the highest that was tested.
TESTED = {"transformer-engine": ("2.0", "2.20.2"), "megatron-core": ("0.12", "0.19.2")}

#: What a broken installation raises when it is imported; all four were seen with Transformer Engine.
BROKEN = (ImportError, OSError, AssertionError, RuntimeError, SyntaxError, AttributeError)

_DISTRIBUTIONS = {
    "transformer-engine": ("transformer_engine", "transformer-engine"),
    "megatron-core": ("megatron-core", "megatron_core"),
}


def installed_version(package: str) -> str | None:
    """Return the version of an installed distribution, without importing it; None if there is none."""
    for name in _DISTRIBUTIONS[package]:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def try_import(name: str) -> tuple[ModuleType | None, str]:
    """Import a module.

    Returns
    -------
    tuple
        The module and ``""``, or None and the reason why it cannot be imported, in one line.
    """
    try:
        return importlib.import_module(name), ""
    except (*BROKEN, SystemExit) as error:
        first = str(error).strip().splitlines()
        return None, f"{type(error).__name__}: {first[0] if first else 'no text'}"


def version_note(package: str, version: str) -> str | None:
    """Return what to know about a version that was not tested; None for a tested one."""
    lowest, highest = TESTED[package]
    try:
        release = Version(version)
    except InvalidVersion:
        return f"{package} {version}: this version is not known here; what it has under the known names is patched"
    if Version(lowest) <= release and release.release[:2] <= Version(highest).release[:2]:
        return None
    return (
        f"{package} {version} was not tested with transformer_engine_ext (tested: {lowest} to {highest}); what it has "
        "under the known names is patched. Run te-ext doctor to see whether its recomputes are exact"
    )
