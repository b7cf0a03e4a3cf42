# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""The audit: a recompute must leave every stream where its forward left it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformer_engine_ext.errors import RecomputeMismatchError
from transformer_engine_ext.pytorch.rng.devices import DeviceBackend, same_value
from transformer_engine_ext.pytorch.rng.snapshot import Rewound

__all__ = ["audit", "mismatch"]

_CAUSES = """\
Likely causes: the function branches on something that changed between forward and backward (a counter, a flag, \
module.train()/eval(), an environment variable); it draws from a generator that is not tracked (add it with \
CudaRNGStatesTracker.add and draw inside tracker.fork(name)); another thread drew from the same default generator; or \
it caches a random result in its first call. Code that must run once only can ask \
transformer_engine_ext.pytorch.is_recomputing(). preserve_rng_state=False turns the rewinding and this check off."""


# Note [The audit is necessary, not sufficient]
# Equal positions do not prove equal numbers: a CUDA offset counts per thread, so a dropout of 10 elements and one of
# 1,000 move it alike. Different positions do prove different numbers, and cost one comparison. A recompute that was
# stopped early was looked at before it stopped (see Note [An early stop is audited]); here only streams that forward
# did not use at all are compared then.
def audit(rewound: Rewound) -> None:
    """Compare where streams stood after a recompute with where they stood after its forward.

    Parameters
    ----------
    rewound : Rewound
        The recompute, after its exit.

    Raises
    ------
    RecomputeMismatchError
        Names every stream that differs, with how far forward and recompute moved it.
    """
    snapshot = rewound.snapshot
    if snapshot.ends is None:  # backward inside the region: forward has not ended, so there is nothing to compare with
        return
    if rewound.exact or not (rewound.complete or rewound.streams or rewound.foreign_reached):
        return
    lines = []
    strays = list(zip(rewound.streams, rewound.strayed, strict=True))
    reached_of = rewound.reached if rewound.complete else ()
    for (name, backend, _, entry), end, reached in zip(snapshot.streams, snapshot.ends, reached_of, strict=False):
        if not backend.same(end, reached) and not (
            backend.unmoved(entry, reached) and _take_twin(strays, backend, name, entry, end, backend.same)
        ):
            forward, recompute = backend.distance(entry, end), backend.distance(entry, reached)
            lines.append(f"  stream {name!r}: forward drew {forward}, recompute drew {recompute}")
    if not rewound.complete:
        for (name, backend, _, entry), end in zip(snapshot.streams, snapshot.ends, strict=True):
            _take_twin(strays, backend, name, entry, end, backend.leads_to)
    for (name, backend, _, entry), strayed in strays:
        if not backend.unmoved(entry, strayed):
            moved = backend.distance(entry, strayed)
            lines.append(f"  stream {name!r}: forward did not use it, recompute drew {moved}")
    for name, state in rewound.foreign_reached.items():
        end = snapshot.foreign_ends.get(name)
        if end is None or not same_value(end, state):
            lines.append(f"  stream {name!r} (tracker of another library): its state after the recompute differs")
    if lines:
        raise mismatch(lines)


# Note [A stream that the region makes has two generators]
# A region that adopts a generator of its own making, or deep-copies a tracker, does so again in the recompute, with
# another generator than in forward. It is the same stream if it has the same name, started from the same value and
# ended at the same position.
def _take_twin(
    strays: list[Any], backend: DeviceBackend, name: str, entry: Any, end: Any, fits: Callable[[Any, Any], bool]
) -> bool:
    """Remove the stream from ``strays`` that is the recompute's twin of a forward's; tell whether there was one."""
    for number, ((other, its, _, start), reached) in enumerate(strays):
        if other == name and its is backend and backend.equal(start, entry) and fits(reached, end):
            del strays[number]
            return True
    return False


def mismatch(lines: list[str]) -> RecomputeMismatchError:
    """Return the error that lists streams, one per line, and the likely causes."""
    return RecomputeMismatchError(
        "The recompute of a checkpointed region drew other random numbers than its forward, so its gradients "
        "would belong to another function than the loss:\n" + "\n".join(lines) + "\n" + _CAUSES
    )
