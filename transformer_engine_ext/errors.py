# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Every exception this package raises on purpose.

Each class also derives from the built-in class that Transformer Engine or PyTorch raises in the same place, so an
``except RuntimeError`` or ``except KeyError`` in existing training code keeps catching what it caught before.
"""

from __future__ import annotations

from torch.utils.checkpoint import CheckpointError as _TorchCheckpointError

__all__ = [
    "TEExtError",
    "CheckpointArgumentError",
    "ConcurrentDrawError",
    "DistributedNotInitializedError",
    "LayoutMismatchError",
    "NativeUnavailableError",
    "NotDifferentiableError",
    "PatchError",
    "PeerFailureError",
    "RecomputeMismatchError",
    "ReentrantGradError",
    "SavedTensorMismatchError",
    "SeedCollisionError",
    "SeedCollisionWarning",
    "SettingError",
    "StateFormatError",
    "StreamExistsError",
    "StreamMismatchError",
    "StreamStateTypeError",
    "SuppressedErrorError",
    "UnknownAxisWarning",
    "UnknownStreamError",
    "UnsupportedCaptureError",
    "UnsupportedDeviceError",
    "UntrackedGeneratorError",
]


class TEExtError(Exception):
    """Base of all errors of this package; catch it to catch whatever the package raises on purpose."""


class StreamExistsError(TEExtError, RuntimeError):
    """A stream name or a seed was added to a tracker twice (Transformer Engine raises ``RuntimeError``)."""


class UnknownStreamError(TEExtError, KeyError):
    """A stream was asked for that the tracker does not hold (Transformer Engine raises ``KeyError``)."""

    def __str__(self) -> str:
        # KeyError shows repr(message), which turns every line break of a multi-line text into a literal "\n".
        return str(self.args[0]) if self.args else ""


class StreamStateTypeError(TEExtError, TypeError):
    """A stream state is neither a ``torch.Generator`` nor a ``uint8`` state tensor."""


class StateFormatError(TEExtError, ValueError):
    """The bytes of a saved state or file are not what their length, type or header promises."""


class RecomputeMismatchError(TEExtError, RuntimeError):
    """A recompute consumed other random numbers than its forward did, so its gradients belong to another function."""


class SavedTensorMismatchError(TEExtError, _TorchCheckpointError):
    """A recompute saved other tensors than its forward did (``torch.utils.checkpoint.CheckpointError`` elsewhere)."""


class ReentrantGradError(TEExtError, RuntimeError):
    """A reentrant region was differentiated with ``torch.autograd.grad`` or ``inputs=``, which it cannot support."""


class NotDifferentiableError(TEExtError, RuntimeError):
    """No output of a reentrant region's recompute requires a gradient, though one arrived in backward."""


class CheckpointArgumentError(TEExtError, ValueError):
    """Arguments of ``te_checkpoint`` that contradict each other or cannot be honoured."""


class SuppressedErrorError(TEExtError, RuntimeError):
    """A context around a checkpointed function swallowed its exception, so there is nothing to return."""


class DistributedNotInitializedError(TEExtError, RuntimeError):
    """Something needs a process group, and ``torch.distributed`` has none (``RuntimeError`` elsewhere)."""


class UntrackedGeneratorError(TEExtError, RuntimeError):
    """With ``NVTE_EXT_DEBUG=1``: a region drew from a generator that no recompute can rewind."""


class ConcurrentDrawError(TEExtError, RuntimeError):
    """With ``NVTE_EXT_DEBUG=1``: two threads drew from default generators while their regions overlapped."""


class UnsupportedCaptureError(TEExtError, RuntimeError):
    """A region was used under CUDA graph capture in a way that cannot be made exact."""


class NativeUnavailableError(TEExtError, ImportError):
    """A native library is asked for and cannot be used; the text says why, and what to install or set."""


class SettingError(TEExtError, ValueError):
    """An environment variable of this package holds a value that it does not know."""


class PatchError(TEExtError, RuntimeError):
    """Something of Transformer Engine or Megatron-core could not be replaced by ``patch()``."""


class UnsupportedDeviceError(TEExtError, RuntimeError):
    """Random numbers live on a device type whose generator this package cannot rewind."""


class SeedCollisionError(TEExtError, RuntimeError):
    """Two streams of one rank would start from the same seed and so draw the same numbers."""


class SeedCollisionWarning(TEExtError, UserWarning):  # noqa: N818 - a warning, which may be made an error
    """Streams of different ranks start from one seed: each rank's own numbers are right, together they repeat."""


class UnknownAxisWarning(TEExtError, UserWarning):  # noqa: N818 - a warning, which may be made an error
    """The topology has an axis that no declared stream names and that has no fixed meaning: perhaps a misnamed one."""


class StreamMismatchError(TEExtError, RuntimeError):
    """The streams of the ranks do not agree where they must, or agree where they must differ."""


class LayoutMismatchError(TEExtError, RuntimeError):
    """Saved streams belong to another parallel layout, or to another set of streams, than the running job."""


class PeerFailureError(TEExtError, RuntimeError):
    """A collective could not finish because another rank died or did not answer in time."""
