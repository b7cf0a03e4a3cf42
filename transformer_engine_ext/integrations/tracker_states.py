# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Tracker states with values, in a form that a training script's checkpoint files can hold as before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Generator

from transformer_engine_ext.pytorch.rng import StreamStates
from transformer_engine_ext.pytorch.rng.devices import backend_of, device_index

__all__ = ["carrying"]


class _PortableStates(StreamStates):
    """Handles with values, which pickle as a plain ``dict`` of generators that stand at those values.

    Megatron writes ``tracker.get_states()`` into its checkpoint files, and reads them back where this package may not
    be installed, with an unpickler that knows few classes.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        generators = {}
        for name, handle in self.items():
            backend = backend_of(handle)
            generators[name] = backend.new_stream(0, device_index(handle))
            backend.write(generators[name], self._value_now(name))
        return dict, (generators,)


def carrying(states: Mapping[str, Generator]) -> dict[str, Generator]:
    """Return ``StreamStates`` in the form that pickles as a plain dict."""
    values = states.state_values if isinstance(states, StreamStates) else {}
    return _PortableStates(states, values)
