# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""The native library only; everything else about the package is static and lies in pyproject.toml.

``NVTE_EXT_WITH_CSRC`` says whether to build it: ``auto``, the default, where it is of use and possible, going on
without it when the build fails; ``1``: always, and a failure is an error; ``0``: never. It is compiled against the
torch of the environment that builds, so only ``pip install --no-build-isolation`` can build it: an isolated build has
no torch (see pyproject.toml) and makes the pure Python wheel.
"""

from __future__ import annotations

import logging
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import ClassVar

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
    """Build the native library into the wheel or, for an editable installation, beside its source."""

    description = "build the native library (NVTE_EXT_WITH_CSRC=auto|0|1)"
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
        for name in (native.LIBRARY, native.INFO):
            (target / name).unlink(missing_ok=True)  # of an earlier build, maybe for another torch
        try:
            setting = native.switch("NVTE_EXT_WITH_CSRC", "auto", ["auto", "0", "1"])
        except native.NativeBuildError as error:
            raise OptionError(str(error)) from None
        if setting == "0":
            self.announce("no native library: NVTE_EXT_WITH_CSRC=0", logging.INFO)
            return
        try:
            self.announce(f"built {self.build_native(target, optional=setting == 'auto')}", logging.INFO)
        except native.NativeBuildError as error:
            if setting == "1":
                raise CompileError(f"NVTE_EXT_WITH_CSRC=1, but the native library can't be built: {error}") from None
            self.warn(f"going on without the native library: {error}")

    def build_native(self, target: Path, *, optional: bool) -> Path:
        """Return the path of the library."""
        try:
            torch = native.TorchBuild.running()
        except (ImportError, OSError) as error:
            raise native.NativeBuildError(
                f"{sys.executable} can't import torch ({error}); an isolated build never can, so use "
                "pip install --no-build-isolation"
            ) from None
        reason = native.obstacle(torch)
        if reason is None and optional and torch.reads_itself:
            reason = f"{torch} needs none"
        if reason is not None:
            raise native.NativeBuildError(reason)
        return native.build(target, torch)

    def has_library(self) -> bool:
        """Tell whether the build that ran has a library to put into a wheel."""
        return not self.editable_mode and self.build_lib is not None and self._outputs()[0].is_file()

    def _outputs(self) -> list[Path]:
        return [Path(self.build_lib) / FOLDER / name for name in (native.LIBRARY, native.INFO)]

    def get_source_files(self) -> list[str]:
        """Return what belongs into the source distribution."""
        return [str(FOLDER / native.SOURCE.name)]

    def get_outputs(self) -> list[str]:
        """Return the files that are there."""
        return [str(path) for path in self._outputs() if path.is_file()] + list(self.get_output_mapping())

    def get_output_mapping(self) -> dict[str, str]:
        """Return, for an editable installation, what lies in the source tree instead."""
        if not self.editable_mode:
            return {}
        return {str(path): str(FOLDER / path.name) for path in self._outputs() if (ROOT / FOLDER / path.name).is_file()}


class Build(build):
    """setuptools' build and the native library."""

    sub_commands: ClassVar = [*build.sub_commands, ("build_native", None)]


class BdistWheel(bdist_wheel):
    """A wheel with a library fits one platform, but every Python: the library knows no Python."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return the wheel's tag; first asked for when everything is built and in place."""
        if self.get_finalized_command("build_native").has_library():
            self.root_is_pure = False
            return "py3", "none", super().get_tag()[2]
        return super().get_tag()


if __name__ == "__main__":
    setup(cmdclass={"build": Build, "build_native": BuildNative, "bdist_wheel": BdistWheel})
