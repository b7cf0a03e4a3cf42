# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Registering tracked streams with CUDA graphs, which torch needs before 2.14 and does by itself since."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Generator

from transformer_engine_ext.pytorch.rng.native import warm_up
from transformer_engine_ext.pytorch.rng.registry import get_all_rng_states

__all__ = ["register_streams", "registering_streams", "registration_needed"]


def registration_needed() -> bool:
    """Tell whether this torch wants generators registered before a capture.

    Since 2.14 (pytorch#176753) a generator joins a capture with its first draw, and the old method warns that it does
    nothing.
    """
    return not hasattr(Generator, "philox_state")


def register_streams(graph: torch.cuda.CUDAGraph, tracker: Any = None) -> None:
    """Register CUDA streams with a graph, before its capture begins.

    Parameters
    ----------
    graph : torch.cuda.CUDAGraph
        The graph.
    tracker : object, optional
        Whose streams: anything with ``get_states()``. The default is every stream that this process knows
        (``get_all_rng_states``).

    Notes
    -----
    Does nothing, and warns of nothing, where torch needs no registration (2.14 and later).
    """
    if not registration_needed():
        return
    warm_up()  # the last moment before a capture at which a library could be built
    states = get_all_rng_states() if tracker is None else tracker.get_states()
    for state in states.values():
        if isinstance(state, Generator) and state.device.type == "cuda":
            graph.register_generator_state(state)


@contextmanager
def registering_streams(tracker: Any = None) -> Iterator[None]:
    """Register streams with every graph whose capture begins inside, for code that makes its graphs out of reach.

    Parameters
    ----------
    tracker : object, optional
        As for ``register_streams``, asked anew at every capture.

    Examples
    --------
    >>> with registering_streams():  # doctest: +SKIP
    ...     layer = torch.cuda.make_graphed_callables(layer, (x,))
    """
    if not registration_needed():
        yield
        return
    graph_class: Any = torch.cuda.CUDAGraph
    begin = graph_class.capture_begin

    def capture_begin(graph: Any, *args: Any, **kwargs: Any) -> Any:
        register_streams(graph, tracker)
        return begin(graph, *args, **kwargs)

    own = "capture_begin" in vars(graph_class)
    graph_class.capture_begin = capture_begin
    try:
        yield
    finally:
        if own:
            graph_class.capture_begin = begin
        else:
            del graph_class.capture_begin
