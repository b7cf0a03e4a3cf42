# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""The words on the device that a stream's random numbers come from while a CUDA graph is captured.

From 2.14 on torch itself gives them (``torch.Generator.philox_state``). Before, an operator of a small library does,
which is built when the package is installed against the torch that is to run, or on demand (``NVTE_EXT_JIT=1``).
Nothing here runs at import, and nothing but capture needs it. :func:`prepare` and :func:`warm_up` also see to the other
library, that of ``native_streams.py``.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Generator, Tensor

from transformer_engine_ext.errors import NativeUnavailableError, UnsupportedCaptureError
from transformer_engine_ext.pytorch.rng import native_find, native_streams
from transformer_engine_ext.pytorch.rng.native_build import PHILOX, TorchBuild

__all__ = ["NotRegistered", "captured_words", "native_status", "prepare", "warm_up"]

Words = tuple[Tensor, Tensor, int]


class NotRegistered(RuntimeError):  # noqa: N818
    """The stream is no part of a capture on its device's current CUDA stream; internal, the text is torch's own."""


class _Reader(NamedTuple):
    read: Callable[[Generator], Words]
    origin: str


# Note [Successes are kept, failures are not]
# Once a way to read was found it stays for the life of the process. A failure is forgotten: an interactive session that
# follows the error's advice (a compiler installed, the library built) then goes on without a restart. The settings are
# read once, at the first use, so that a typo is an error and a later change of the environment has no half effects.
_reader: _Reader | None = None
_warm = False
_lock = threading.RLock()


def captured_words(generator: Generator) -> Words:
    """Return where the kernels that are being captured read a stream's seed and offset.

    Parameters
    ----------
    generator : torch.Generator
        A CUDA stream that takes part in the capture on its device's current CUDA stream.

    Returns
    -------
    seed, offset : Tensor
        ``int64``, shape ``(1,)``, on the generator's device: the bits of the unsigned 64-bit words that every replay
        refills. They alias the capture's state and must not be used once the graph is gone. Before the first replay
        their contents are undefined; so they stay if nothing of the graph draws from the stream.
    intragraph : int
        What was drawn in this capture so far, in 32-bit numbers per thread: the next kernel draws at
        ``offset + intragraph``.

    Raises
    ------
    NotRegistered
        If nothing is being captured there or, before torch 2.14, the stream is not registered with the graph.
    UnsupportedCaptureError
        If there is no way to read it with this installation; the text names what to install.
    """
    reader = _reader
    if reader is None:
        try:
            reader = _find(may_build=False)
        except NativeUnavailableError as error:
            raise UnsupportedCaptureError(str(error)) from None
    # Out of sight of dispatch modes (selective checkpointing's, this package's debug mode): this is no part of the
    # user's program. And on the generator's device, whose current CUDA stream decides.
    with torch._C._DisableTorchDispatch(), torch.cuda.device(generator.device):
        try:
            return reader.read(generator)
        except _DEVICE_ERRORS:
            raise
        except RuntimeError as error:
            raise NotRegistered(str(error).partition("\n")[0]) from error


def native_status() -> tuple[bool, str]:
    """Tell whether streams can be read under capture, and how, or why not; loads the library, but builds nothing.

    Raises
    ------
    SettingError
        If one of the environment variables holds an unknown value.
    """
    try:
        return True, _find(may_build=False).origin
    except NativeUnavailableError as error:
        return False, str(error)


def prepare() -> None:
    """Make sure that streams can be read under capture; call it before a capture starts.

    With ``NVTE_EXT_JIT=1`` and no library that fits, this compiles one, or waits for the process of this job that does:
    about 15 seconds, once per machine, torch and user. The library that moves streams faster is prepared first, in the
    same way; that it cannot be had is an error with ``NVTE_EXT_NATIVE=1`` only.

    Raises
    ------
    NativeUnavailableError
        If they can't; the text names what to install or to set.
    UnsupportedCaptureError
        If a library would have to be compiled while a graph is being captured.
    SettingError
        If one of the environment variables holds an unknown value.
    """
    native_streams.prepare()
    _find(may_build=True)


def warm_up() -> None:
    """Do once what the environment asks for before a first capture; cheap when it asks for nothing.

    ``NVTE_EXT_NATIVE=1``: raise now, and not in the capture, if streams can't be read there. ``NVTE_EXT_JIT=1``: build
    now. Meant for the start of a region on CUDA; does nothing while a graph is being captured.

    Raises
    ------
    NativeUnavailableError
        With ``NVTE_EXT_NATIVE=1``, as :func:`prepare`.
    SettingError
        If one of the environment variables holds an unknown value.
    """
    global _warm
    if _warm:
        return
    settings = native_find.settings()
    if settings.native == "1" or settings.jit:
        if native_find.capturing():
            return
        try:
            prepare()
        except NativeUnavailableError as error:
            if settings.native == "1":
                raise
            warnings.warn(f"{error} Training without capture is not affected.", RuntimeWarning, stacklevel=2)
    _warm = True


def _find(*, may_build: bool) -> _Reader:
    # See Note [Successes are kept, failures are not]
    global _reader
    with _lock:
        if _reader is None:
            native_find.settings()  # a typo is an error whether or not a library is needed
            build = TorchBuild.running()
            _reader = _torch_reader(build) if build.reads_itself else _library_reader(build, may_build)
        return _reader


def _torch_reader(build: TorchBuild) -> _Reader:
    if build.cuda is None:
        raise NativeUnavailableError(f"{build} has no CUDA graphs, so there is nothing to capture.")
    return _Reader(_read_by_method, f"torch.Generator.philox_state of {build}")


def _read_by_method(generator: Generator) -> Words:
    seed, offset, intragraph = cast(Any, generator).philox_state(0)
    if seed.device.type != "cuda":
        raise RuntimeError(_NOT_CAPTURING)
    return seed, offset, int(intragraph)


def _library_reader(build: TorchBuild, may_build: bool) -> _Reader:
    if build.cuda is None:
        raise NativeUnavailableError(f"{build} has no CUDA graphs, so there is nothing to capture.")
    library, reason = native_find.find(PHILOX, build, may_build=may_build)
    if reason is not None:
        raise NativeUnavailableError(_explain(build, reason))
    try:
        torch.ops.load_library(str(library))
    except OSError as error:
        raise NativeUnavailableError(_explain(build, f"{library} cannot be loaded: {error}")) from error
    return _Reader(_read_by_operator, f"{library}, built for {build}")


def _read_by_operator(generator: Generator) -> Words:
    seed, offset, intragraph, captured = torch.ops.transformer_engine_ext.captured_philox(generator)
    if not captured:
        raise RuntimeError(_NOT_CAPTURING)
    return seed, offset, intragraph


def _explain(build: TorchBuild, reason: str) -> str:
    return (
        "random-number streams can't be read while a CUDA graph is captured. That takes torch >= 2.14, or before it "
        f"this package's native library, which {build} can't use here:\n"
        f"  {reason}\n"
        "Do one of these:\n"
        "  - install torch >= 2.14;\n"
        f"{native_find.INSTALL}"
        "  - set NVTE_EXT_JIT=1, which compiles it on demand, and before the capture run one region without capture or "
        f"call\n    {__name__}.prepare()\n"
        "Regions that are not captured need none of this."
    )


_NOT_CAPTURING = "nothing is being captured on the device's current CUDA stream"

#: What CUDA itself reports is never about registration.
_DEVICE_ERRORS: tuple[type[BaseException], ...] = tuple(
    kind for kind in [getattr(torch, "AcceleratorError", None)] if kind is not None
)
