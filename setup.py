# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""The native libraries only; everything else about the package is static and lies in pyproject.toml.

``NVTE_EXT_WITH_CSRC`` says whether to build those that the torch of the environment has a use for: ``auto``, the
default, goes on without one that can't be built; ``1`` makes that an error; ``0`` builds none. They are compiled
against that torch, so only ``pip install --no-build-isolation`` can build them: an isolated build has no torch (see
pyproject.toml) and makes the pure Python wheel.
"""

from __future__ import annotations

import logging
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, ClassVar

from setuptools import Command, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build
from setuptools.errors import CompileError, OptionError

ROOT = Path(__file__).resolve().parent
FOLDER = Path("transformer_engine_ext", "csrc")

# By its path: importing it as a part of the package would import torch.
_spec = spec_from_file_location("native_build", ROOT / "transformer_engine_ext/pytorch/rng/native_build.py")
native = module_from_spec(_spec)
_spec.loader.exec_module(native)


class BuildNative(Command):
    """Build the native libraries into the wheel or, for an editable installation, beside their sources."""

    description = "build the native libraries (NVTE_EXT_WITH_CSRC=auto|0|1)"
    user_options: ClassVar[list[tuple[str, str, str]]] = []
    editable_mode = False

    def initialize_options(self) -> None:
        """Set what setuptools expects of a command."""
        self.build_lib = None

    def finalize_options(self) -> None:
        """Take over where the Python files go: without an extension module, setuptools has one place for all."""
        self.set_undefined_options("build_py", ("build_lib", "build_lib"))

    def run(self) -> None:
        """Build, or say why not."""
        target = (ROOT if self.editable_mode else Path(self.build_lib)) / FOLDER
        for library in native.LIBRARIES:
            for name in library.files:
                (target / name).unlink(missing_ok=True)  # of an earlier build, maybe for another torch
        try:
            setting = native.switch("NVTE_EXT_WITH_CSRC", "auto", ["auto", "0", "1"])
        except native.NativeBuildError as error:
            raise OptionError(str(error)) from None
        if setting == "0":
            self.announce("no native libraries: NVTE_EXT_WITH_CSRC=0", logging.INFO)
            return
        try:
            torch = native.TorchBuild.running()
        except (ImportError, OSError) as error:
            self.go_on_without(
                "the native libraries",
                f"{sys.executable} can't import torch ({error}); an isolated build never can, so use "
                "pip install --no-build-isolation",
                allowed=setting == "auto",
            )
            return
        for library in native.LIBRARIES:
            self.build_library(library, target, torch, optional=setting == "auto")

    def build_library(self, library: Any, target: Path, torch: Any, *, optional: bool) -> None:
        """Build one library, unless this torch has no use for it."""
        unused = library.unused(torch)
        if unused is not None:
            self.announce(f"{library.file} is not built: {unused}", logging.INFO)
            return
        reason = library.obstacle()
        if reason is None:
            try:
                self.announce(f"built {native.build(library, target, torch)}", logging.INFO)
            except native.NativeBuildError as error:
                reason = str(error)
        if reason is not None:
            self.go_on_without(f"{library.file} ({library.purpose})", reason, allowed=optional)

    def go_on_without(self, what: str, reason: str, *, allowed: bool) -> None:
        """Warn or raise."""
        if not allowed:
            raise CompileError(f"NVTE_EXT_WITH_CSRC=1, but {what} can't be built: {reason}")
        self.warn(f"going on without {what}: {reason}")

    def has(self, *libraries: Any) -> bool:
        """Tell whether the build that ran has one of the libraries to put into a wheel."""
        return not self.editable_mode and any((self._target() / library.file).is_file() for library in libraries)

    def _target(self) -> Path:
        return Path(self.build_lib) / FOLDER

    def _outputs(self) -> list[Path]:
        return [self._target() / name for library in native.LIBRARIES for name in library.files]

    def get_source_files(self) -> list[str]:
        """Return what belongs into the source distribution."""
        return [str(FOLDER / path.name) for library in native.LIBRARIES for path in (library.source, *library.headers)]

    def get_outputs(self) -> list[str]:
        """Return the files that are there."""
        return [str(path) for path in self._outputs() if path.is_file()] + list(self.get_output_mapping())

    def get_output_mapping(self) -> dict[str, str]:
        """Return, for an editable installation, what lies in the source tree instead."""
        if not self.editable_mode:
            return {}
        return {str(path): str(FOLDER / path.name) for path in self._outputs() if (ROOT / FOLDER / path.name).is_file()}


class Build(build):
    """setuptools' build and the native libraries."""

    sub_commands: ClassVar = [*build.sub_commands, ("build_native", None)]


class BdistWheel(bdist_wheel):
    """A wheel with a library fits one platform, and the Pythons that can load all that is in it."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return the wheel's tag; first asked for when everything is built and in place."""
        built = self.get_finalized_command("build_native")
        if not built.has(*native.LIBRARIES):
            return super().get_tag()
        self.root_is_pure = False
        platform = super().get_tag()[2]
        if built.has(*[library for library in native.LIBRARIES if library.extension]):
            return "cp" + "".join(map(str, native.LIMITED_API)), "abi3", platform
        return "py3", "none", platform  # torch loads the others: they know no Python


if __name__ == "__main__":
    setup(cmdclass={"build": Build, "build_native": BuildNative, "bdist_wheel": BdistWheel})
