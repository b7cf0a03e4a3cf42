# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""CUDA streams inside graph capture: saved, rewound and put back on the device, by nodes of the graph itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Generator, Tensor

from transformer_engine_ext.errors import UnsupportedCaptureError
from transformer_engine_ext.pytorch.rng.native import NotRegistered, captured_words
from transformer_engine_ext.pytorch.rng.state import PhiloxState, set_offset_word

__all__ = ["SavedWords", "capturing", "require_registered", "set_host_offset"]

# Note [Inside graph capture]
# A kernel that is captured does not get numbers but pointers to two device words, seed and offset, which every replay
# fills anew, and an offset within the graph, which is fixed at capture. So where a stream stands inside a graph is
# (*seed, *offset + within), known to the device only. The words stay as they are while a graph runs; what draws move is
# the host's `within`, which Generator.get_state and set_state read and write during capture.
# - Forward keeps a copy of the words, made by one node when the region ends, and the host's `within` at its entry.
# - A recompute, in this or in another graph, first copies the live words of all streams, then overwrites them with the
#   kept ones, sets the host's `within` to that of the region's entry, runs, and puts both back.
# Nothing synchronises, and nothing depends on the order of replays: the recompute overwrites what a replay filled in or
# left as it was (a stream that the whole graph moves by nothing is not filled). The words of all streams move in one
# call each, so the number of nodes does not grow with the number of streams (a call takes 32). While a recompute runs,
# its streams' words are rewound for everybody who reads them: kernels of the same streams on a parallel branch of
# the graph and, before torch 2.14, where all graphs of a stream share one pair of words, in a graph that replays
# concurrently on another CUDA stream.


#: Whether the current CUDA stream is being captured, where CUDA runs; torch.cuda wraps this in one more function.
stream_captures: Callable[[], bool] = getattr(
    torch._C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing
)


def capturing() -> bool:
    """Tell whether the current CUDA stream is being captured into a graph."""
    return torch.cuda.is_initialized() and stream_captures()


def set_host_offset(handle: Generator, offset: int) -> None:
    """Set where a stream stands: outside of capture in the sequence of its seed, inside within the graph."""
    value = handle.get_state()
    set_offset_word(value, offset)
    handle.set_state(value)


def require_registered(name: str, handle: Generator) -> tuple[Tensor, Tensor]:
    """Return the device words (seed, offset) of a stream, or refuse one that the graph under capture does not know.

    Raises
    ------
    UnsupportedCaptureError
        Names the stream and says how to register it.
    """
    try:
        return captured_words(handle)[:2]
    except NotRegistered:
        raise UnsupportedCaptureError(
            f"stream {name!r} is used inside CUDA graph capture, but it is not registered with the graph, so its draws "
            "cannot be captured. Before torch 2.14 register it before the capture begins: "
            "transformer_engine_ext.pytorch.distributed.register_streams(graph), or wrap the code that captures in "
            "`with registering_streams():` where the graph is made out of reach"
        ) from None


class SavedWords:
    """Device words of some streams, as they are when this runs.

    Parameters
    ----------
    streams : sequence of tuple
        Name and handle (``torch.Generator``) of each; several may share one state.

    Raises
    ------
    UnsupportedCaptureError
        Here, and from ``rewind``: if the graph under capture does not know a stream.
    """

    __slots__ = ("_all", "_distinct", "_words")

    def __init__(self, streams: Sequence[tuple[str, Generator]]) -> None:
        # One entry per state: two writes to one word in one node would race.
        by_word: dict[int, tuple[str, Generator]] = {}
        self._all = [(stream[1], by_word.setdefault(_address(*stream), stream)[1]) for stream in streams]
        self._distinct = list(by_word.values())
        self._words = _copies(_words_of(self._distinct))

    def rewind(self) -> list[Tensor]:
        """Overwrite the live words with the saved ones; return copies of the live ones for ``restore``."""
        words = _words_of(self._distinct)
        live = _copies(words)
        _overwrite(words, self._words)
        return live

    def restore(self, live: list[Tensor]) -> None:
        """Undo ``rewind``."""
        _overwrite(_words_of(self._distinct), live)

    def read_back(self) -> dict[int, PhiloxState]:
        """Return the saved words by ``id`` of the handle, as the graph's latest replay left them.

        Notes
        -----
        Waits for the device: for a backward outside of any graph only.
        """
        numbers = [int(word.item()) % (1 << 64) for word in self._words]
        states = {id(handle): PhiloxState(*numbers[2 * i : 2 * i + 2]) for i, (_, handle) in enumerate(self._distinct)}
        return {id(handle): states[id(first)] for handle, first in self._all}


def _address(name: str, handle: Generator) -> int:
    return require_registered(name, handle)[0].data_ptr()


def _words_of(streams: Sequence[tuple[str, Generator]]) -> list[Tensor]:
    return [word for name, handle in streams for word in require_registered(name, handle)]


@torch.no_grad()
def _copies(words: list[Tensor]) -> list[Tensor]:
    return list(torch._foreach_add(words, 0)) if words else []


@torch.no_grad()
def _overwrite(words: list[Tensor], values: list[Tensor]) -> None:
    if words:
        torch._foreach_copy_(words, values)
