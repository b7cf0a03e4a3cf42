# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Run by test_native_library.py in a process of its own, on a GPU; its argument is a library to read with, if any."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch

from transformer_engine_ext.pytorch.rng import native

Read = Callable[[torch.Generator], tuple[torch.Tensor, torch.Tensor, int]]


def reader() -> Read:
    """Return `captured_words`, or what the library of the command line gives."""
    if len(sys.argv) < 2:
        native.prepare()
        print(native.native_status())
        return native.captured_words
    torch.ops.load_library(sys.argv[1])
    print(sys.argv[1])
    return lambda generator: torch.ops.transformer_engine_ext.captured_philox(generator)[:3]


def refused(read: Read, generator: torch.Generator) -> str:
    try:
        read(generator)
    except (native.NotRegistered, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main() -> None:
    read = reader()
    direct = len(sys.argv) >= 2  # then errors and "not captured" come as the operator gives them
    torch.cuda.init()
    default = torch.cuda.default_generators[0]
    tracked, stranger = default.clone_state(), default.clone_state()
    for seed, generator in enumerate((default, tracked, stranger), 11):
        generator.manual_seed(seed)
    alias = tracked.graphsafe_get_state()
    if not direct:
        assert "nothing is being captured" in refused(read, default)

    graph = torch.cuda.CUDAGraph()
    registers = not hasattr(torch.Generator, "philox_state")
    if registers:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            graph.register_generator_state(tracked)
    found: dict[str, Any] = {}
    with torch.cuda.graph(graph):
        found["default"] = read(default)
        found["tracked"] = read(tracked)
        found["alias"] = read(alias)
        out = torch.rand(64, device="cuda")
        found["drawn"] = read(default)
        torch.rand(64, device="cuda", generator=tracked)
        if registers:
            text = refused(read, stranger)
            assert "capture mode" in text, text
        kept = torch.cat([*found["default"][:2], *found["tracked"][:2]])

    for seed, offset, intragraph in found.values():
        assert (seed.dtype, offset.dtype) == (torch.int64, torch.int64)
        assert (seed.shape, offset.shape) == ((1,), (1,))
        assert seed.device == offset.device == torch.device("cuda:0")
        assert type(intragraph) is int
    pointers = {name: (seed.data_ptr(), offset.data_ptr()) for name, (seed, offset, _) in found.items()}
    assert pointers["alias"] == pointers["tracked"] != pointers["default"] == pointers["drawn"]
    assert (found["default"][2], found["drawn"][2]) == (0, 4), "reading moves nothing, drawing does"

    for seed in (5, 6):
        default.manual_seed(seed)
        tracked.manual_seed(seed + 100)
        torch.rand(100, device="cuda")  # an eager draw, so that the offset is not 0
        before = default.get_offset()
        assert before > 0
        graph.replay()
        assert kept.tolist() == [seed, before, seed + 100, 0]
        assert default.get_offset() == before + 4
        replayed = out.clone()
        default.set_offset(before)
        assert torch.equal(replayed, torch.rand(64, device="cuda")), "the same position gives the same numbers"
    print("OK")


if __name__ == "__main__":
    main()
