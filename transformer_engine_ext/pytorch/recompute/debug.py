# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""``NVTE_EXT_DEBUG=1``: watch every operator of a region for draws that no recompute can repeat.

It also remembers the last runs of regions, and what each drew; a mismatch then lists them.
"""

from __future__ import annotations

import itertools
import os
import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from transformer_engine_ext.errors import (
    ConcurrentDrawError,
    RecomputeMismatchError,
    SavedTensorMismatchError,
    UntrackedGeneratorError,
)
from transformer_engine_ext.pytorch.recompute.history import Run, append_history
from transformer_engine_ext.pytorch.rng.recording import Recording, noted_handles, watch_forks

__all__ = ["explain", "watching"]

# Read once: the mode slows every operator down, so it is meant for a run of its own.
ENABLED = os.environ.get("NVTE_EXT_DEBUG", "0") == "1"

_runs: dict[int, int] = {}  # number of an open run -> its thread
_numbers = itertools.count()


# Note [Concurrent draws cannot be exact]
# A default generator belongs to the process. Two threads that draw from it at the same time interleave in an order that
# no recompute can repeat, here as in any other system. What proves it: a thread draws inside its region while another
# thread's run, begun later, is still open. (The other way round proves nothing: a thread whose region waits in a
# backward of its own sees the recomputes of autograd's threads come and go.) Outside of the debug mode the audit
# reports most such draws, as a mismatch.
class _Watch(TorchDispatchMode):
    """Watches one run, forward or recompute, of one region."""

    def __init__(self, run: Run) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._run = run

    def __enter__(self) -> Any:
        self._number = next(_numbers)
        _runs[self._number] = threading.get_ident()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *exception: Any) -> None:
        _runs.pop(self._number, None)
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._run.close(exception[1])

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        generator = kwargs.get("generator")
        if generator is not None and not _is_rewound(generator):
            raise UntrackedGeneratorError(
                f"a checkpointed region drew from a generator of its own ({func} with generator=, seed "
                f"{generator.initial_seed()}, device {generator.device}), which no recompute rewinds: its gradients "
                "would belong to other random numbers. Make it a stream: tracker.add(name, seed), and draw from the "
                "default generator inside tracker.fork(name)"
            )
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._run.draws[str(func)] += 1
            self._refuse_concurrent(func)
        return func(*args, **kwargs)

    def _refuse_concurrent(self, func: Any) -> None:
        mine = threading.get_ident()
        others = {thread for number, thread in list(_runs.items()) if thread != mine and number > self._number}
        if others:
            raise ConcurrentDrawError(
                f"{func} drew from a default generator inside a checkpointed region of thread {mine} while a region "
                f"of thread {others.pop()} was open: they share the generator, so no recompute can repeat the order "
                "of their draws. Run the regions one after the other, or draw inside tracker.fork() of a stream per "
                "thread, one thread at a time"
            )


def _is_rewound(generator: torch.Generator) -> bool:
    """Tell whether the region covers this generator: a default one, or a stream that it has noted."""
    # Operators see another Python object for the same generator, so the C++ object decides.
    defaults: list[Any] = [torch.default_generator]
    if torch.cuda.is_initialized():
        defaults += torch.cuda.default_generators
    wanted: Any = generator
    return any(known._cdata == wanted._cdata for known in (*defaults, *noted_handles()))


def refuse_foreign_fork(name: str) -> None:
    """Refuse a fork by a thread that runs no region, while a region of another thread is open."""
    mine = threading.get_ident()
    threads = set(_runs.values())
    if threads and mine not in threads:
        raise ConcurrentDrawError(
            f"thread {mine} forked stream {name!r} while a checkpointed region of thread {threads.pop()} was open. If "
            "it works for that region, its draws are not noted, so no recompute can repeat them; if not, the two draw "
            "from one default generator. Fork in the region's own thread"
        )


_OFF = nullcontext()
if ENABLED:
    watch_forks(refuse_foreign_fork)


def watching(region: Any, recording: Recording | None, phase: str) -> AbstractContextManager[Any]:
    """Return the context for one run of a region; it does nothing unless the debug mode is on.

    Parameters
    ----------
    region : Region
        The region.
    recording : Snapshot, Rewound or None
        The run's streams; None with ``preserve_rng_state=False``.
    phase : str
        ``"forward"`` or ``"recompute"``.
    """
    return _Watch(Run(region, recording, phase)) if ENABLED else _OFF


def explain(error: BaseException) -> None:
    """Append the last runs of regions to a mismatch, in the debug mode; change nothing else."""
    if ENABLED and isinstance(error, (RecomputeMismatchError, SavedTensorMismatchError)):
        append_history(error)
