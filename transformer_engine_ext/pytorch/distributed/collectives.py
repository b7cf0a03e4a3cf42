# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Small messages between all ranks that end in an error, never in a hang, when a rank has died."""

from __future__ import annotations

import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from transformer_engine_ext.errors import PeerFailureError

__all__ = ["DEFAULT_TIMEOUT", "ControlGroup"]

#: How long ranks wait for each other. Generous, since one rank may still be writing its weights when others save.
DEFAULT_TIMEOUT = timedelta(minutes=5)

# Once its group is gone, a surviving rank answers the roll call within milliseconds.
_ROLL_CALL_SECONDS = 5.0
_FIRST_LOOK_SECONDS = 1.0

_T = TypeVar("_T")


# Note [Groups are not kept alive]
# Only weak references to process groups are kept. torch.distributed keeps its groups itself until they are destroyed; a
# group that lives longer keeps gloo's threads alive, and one of those that frees a tensor while the interpreter ends
# (it needs the interpreter's lock for that) aborts the process: "terminate called without an active exception".
class _SharedGroups:
    """The gloo groups of this process, one per time-out, for as long as the world stays the same."""

    # Shared, because every group costs a connection per pair of ranks, and so that it does not matter through which
    # object a rank takes part in a message.
    def __init__(self) -> None:
        self._world: weakref.ref[dist.ProcessGroup] | None = None
        self._groups: dict[timedelta, weakref.ref[dist.ProcessGroup]] = {}

    def get(self, timeout: timedelta) -> dist.ProcessGroup:
        """Return the group; the first call for a time-out makes it, which is a collective call itself."""
        world = dist.group.WORLD
        if self._world is None or world is not self._world():
            # See Note [Groups are not kept alive]
            self._world, self._groups = weakref.ref(world) if world is not None else None, {}
        known = self._groups.get(timeout)
        group = known() if known is not None else None
        if group is None:
            group = dist.new_group(backend="gloo", timeout=timeout)
            self._groups[timeout] = weakref.ref(group)
        return group

    def drop(self, timeout: timedelta) -> str:
        """Destroy a group that failed; returns its name, "new" if it was not made yet."""
        known = self._groups.pop(timeout, None)
        group = known() if known is not None else None
        if group is None:
            return "new"
        name = group.group_name
        with suppress(RuntimeError):
            dist.destroy_process_group(group)
        return name


_shared = _SharedGroups()


# Note [A dead peer is an error]
# Messages go through a gloo group of their own: it works on CPU tensors whatever backend the job uses, and its
# time-out belongs to this package instead of being the job's (30 minutes with gloo). A collective on it fails at once
# where a connection to the dead rank breaks, else when the time-out ends. Whoever fails first destroys its side of the
# group, so that the ranks that wait for *it* fail too instead of waiting on; then every survivor answers a roll call
# through the rendezvous store, and those who do not answer are named. The process that hosts the store waits there
# until the other survivors have looked.
class ControlGroup:
    """All ranks of the job, for messages of a few bytes per rank. Every method is a collective call.

    What a rank sends does not grow with the number of ranks; only rank 0 receives from, or sends to, each of them.

    Parameters
    ----------
    timeout : timedelta
        How long to wait for the other ranks, per collective.

    Raises
    ------
    PeerFailureError
        From every method: if a rank died or did not answer in time; up to 5 s, on rank 0 10 s, beyond the time-out,
        for the roll call.
    RuntimeError
        From every method: if the default process group is another one than when this object was made.
    """

    def __init__(self, timeout: timedelta = DEFAULT_TIMEOUT) -> None:
        self.timeout = timeout
        initialised = dist.is_available() and dist.is_initialized()
        self.rank, self.world_size = (dist.get_rank(), dist.get_world_size()) if initialised else (0, 1)
        world = dist.group.WORLD if initialised else None
        self._world = weakref.ref(world) if world is not None else None  # See Note [Groups are not kept alive]

    def gather(self, payload: bytes, what: str) -> list[bytes] | None:
        """Return every rank's bytes, in the order of ranks, on rank 0; None on the others."""
        self.check_world(what)
        if self.world_size == 1:
            return [payload]
        longest = torch.tensor([len(payload)])
        self._guarded(what, lambda group: dist.all_reduce(longest, dist.ReduceOp.MAX, group=group))
        width = _plausible(longest, what, len(payload))
        padded = _to_tensor(len(payload).to_bytes(8, "little") + payload.ljust(width, b"\0"))
        if self.rank:
            self._guarded(what, lambda group: dist.gather(padded, None, dst=0, group=group))
            return None
        received = [torch.empty_like(padded) for _ in range(self.world_size)]
        self._guarded(what, lambda group: dist.gather(padded, received, dst=0, group=group))
        return [_unpadded(row) for row in received]

    def scatter(self, payloads: Sequence[bytes] | None, what: str) -> bytes:
        """Return to every rank the entry that rank 0 passes for it; the other ranks pass None."""
        self.check_world(what)
        if self.world_size == 1:
            return payloads[0] if payloads else b""
        longest = torch.tensor([max(map(len, payloads)) if payloads else 0])
        self._guarded(what, lambda group: dist.broadcast(longest, 0, group=group))
        width = _plausible(longest, what)
        received = torch.empty(8 + width, dtype=torch.uint8)
        rows = None
        if self.rank == 0 and payloads is not None:
            rows = [_to_tensor(len(row).to_bytes(8, "little") + row.ljust(width, b"\0")) for row in payloads]
        self._guarded(what, lambda group: dist.scatter(received, rows, src=0, group=group))
        return _unpadded(received)

    def total(self, words: Sequence[int], what: str) -> list[int]:
        """Return, on every rank, the sums over all ranks of each of a few integers below 2**44."""
        sums = torch.tensor(words)
        self.check_world(what)
        if self.world_size > 1:
            self._guarded(what, lambda group: dist.all_reduce(sums, group=group))
        totals: list[int] = sums.tolist()
        return totals

    def broadcast(self, payload: bytes, what: str) -> bytes:
        """Return rank 0's bytes on every rank; what the other ranks pass is ignored."""
        self.check_world(what)
        if self.world_size == 1:
            return payload
        size = torch.tensor([len(payload)])
        self._guarded(what, lambda group: dist.broadcast(size, 0, group=group))
        message = _to_tensor(payload) if self.rank == 0 else torch.empty(_plausible(size, what), dtype=torch.uint8)
        if int(size):
            self._guarded(what, lambda group: dist.broadcast(message, 0, group=group))
        return _to_bytes(message)

    def first_failure(self, failed: bool, what: str) -> int | None:
        """Return the lowest rank that passed ``failed=True``, on every rank; None if no rank did."""
        self.check_world(what)
        if self.world_size == 1:
            return 0 if failed else None
        flag = torch.tensor([self.rank if failed else self.world_size])
        self._guarded(what, lambda group: dist.all_reduce(flag, dist.ReduceOp.MIN, group=group))
        return int(flag) if int(flag) < self.world_size else None

    def relay(self, payload: bytes, source: int, what: str) -> bytes:
        """Return the bytes that rank `source` passed, on every rank."""
        gathered = self.gather(payload if self.rank == source else b"", what)
        return self.broadcast(gathered[source] if gathered is not None else b"", what)

    def check_world(self, what: str) -> None:
        """Raise if the ranks of the job are not those that this object was made for. Local."""
        initialised = dist.is_available() and dist.is_initialized()
        now = dist.get_world_size() if initialised else 1
        world = dist.group.WORLD if initialised else None
        then = self._world() if self._world is not None else None
        ended = self._world is not None and then is None
        # A single process remains one whether or not it has a group.
        if max(now, self.world_size) > 1 and (ended or world is not then):
            raise RuntimeError(
                f"{what}: torch.distributed was ended or initialised anew since this object was made (then: rank "
                f"{self.rank} of {self.world_size}, now {now} in all); make a new one"
            )

    def _guarded(self, what: str, collective: Callable[[dist.ProcessGroup], _T]) -> _T:
        # See Note [A dead peer is an error]
        try:
            return collective(_shared.get(self.timeout))
        except RuntimeError as error:
            # The frames of what failed still hold the group: its connections would stay open, and ranks that wait for
            # this one would wait on.
            traceback.clear_frames(error.__traceback__)
            raise PeerFailureError(self._explain(what, error)) from error

    def _explain(self, what: str, error: RuntimeError) -> str:
        missing = self._roll_call(_shared.drop(self.timeout))
        head = f"{what}: rank {self.rank} of {self.world_size} could not finish the exchange with the other ranks. "
        if missing is None:
            who = (
                "The rendezvous store is gone too: the process that hosts it (normally rank 0) has died, or ended "
                "after an error of its own. "
            )
        elif missing:
            names = ", ".join(map(str, missing))
            who = f"{'Rank' if len(missing) == 1 else 'Ranks'} {names} died or did not answer. "
        else:
            who = f"Every rank still runs, so one was more than {self.timeout.total_seconds():g} s late. "
        return (
            f"{head}{who}Nothing was changed here; look at the missing rank's log and restart the job. Cause: {error}"
        )

    def _roll_call(self, group_name: str) -> list[int] | None:
        """Return the ranks that do not answer; None if the store does not answer."""
        here, heard = (
            [f"transformer_engine_ext/roll_call/{group_name}/{word}{rank}" for rank in range(self.world_size)]
            for word in ("", "heard/")
        )
        missing: list[int] | None = None
        try:
            store = dist.distributed_c10d._get_default_store()
            store.set(here[self.rank], "here")
            _poll(store, here, _FIRST_LOOK_SECONDS)
            missing = [rank for rank, key in enumerate(here) if not store.check([key])]
            _poll(store, [here[rank] for rank in missing], _ROLL_CALL_SECONDS - _FIRST_LOOK_SECONDS)
            missing = [rank for rank in missing if not store.check([here[rank]])]
            store.set(heard[self.rank], "heard")
            if self.rank == 0:
                # Normally this process hosts the store, so it stays until those that are here have looked, too.
                _poll(store, [key for rank, key in enumerate(heard) if rank not in set(missing)], _ROLL_CALL_SECONDS)
        except RuntimeError:
            pass  # what was seen before the store went still holds
        return missing


def _poll(store: Any, keys: list[str], seconds: float) -> None:
    """Wait until all keys are set, or the time is over."""
    deadline = time.monotonic() + seconds
    while keys and not store.check(keys) and time.monotonic() < deadline:
        time.sleep(0.05)


def _plausible(size: Tensor, what: str, least: int = 0) -> int:
    """Return a size that the ranks agreed on, unless it can only come from a rank that is in another call."""
    if not least <= int(size) < 1 << 36:
        raise RuntimeError(
            f"{what}: the ranks are not in the same call, since one announced {int(size)} bytes. Every rank must call "
            "verify(), save() and load() in the same order. Nothing was changed here; restart the job"
        )
    return int(size)


def _to_tensor(payload: bytes) -> Tensor:
    return torch.frombuffer(bytearray(payload), dtype=torch.uint8) if payload else torch.empty(0, dtype=torch.uint8)


def _to_bytes(message: Tensor) -> bytes:
    data: bytes = message.numpy().tobytes()
    return data


def _unpadded(message: Tensor) -> bytes:
    data = _to_bytes(message)
    return data[8 : 8 + int.from_bytes(data[:8], "little")]
