# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""B12 under capture: a selective policy keeps the result of one random operator, and another one is drawn again."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from _capture import ORDERS, FakeKit, Kit, Outcome, Rig, Split, assert_like_plain, kit
from _regions import both_engines
from transformer_engine_ext.errors import RecomputeMismatchError, UnsupportedCaptureError
from transformer_engine_ext.pytorch.recompute import selective

__all__ = ["kit"]

# Operators that draw on a device that is not there: torch's own would draw on the CPU.
_library = torch.library.Library("transformer_engine_ext_tests", "DEF")
for _name in ("saved", "drawn"):
    _library.define(f"{_name}(Tensor like) -> Tensor", tags=torch.Tag.nondeterministic_seeded)
    _library.impl(_name, lambda like: _kits[-1].machine.mask(like), "CPU")
    _library.impl(_name, torch.library.fallthrough_kernel, "Autograd")
_ops = torch.ops.transformer_engine_ext_tests
_kits: list[FakeKit] = []


@pytest.fixture(autouse=True)
def _drawing(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if isinstance(kit, FakeKit):
        kit.machine.drawing = {_ops.saved.default, _ops.drawn.default}
        monkeypatch.setattr(selective, "_device_of", lambda result: torch.device("cuda", 0))
        _kits.append(kit)
    yield
    _kits.clear()


class SelectiveRig(Rig):
    """In every region the result of the first operator is kept; the second one drops."""

    def __init__(self, kit: Kit, use_reentrant: bool | None) -> None:
        kept = torch.ops.aten.rand_like.default if kit.real else _ops.saved.default
        contexts = functools.partial(create_selective_checkpoint_contexts, [kept])
        super().__init__(kit, use_reentrant, ("default", "default", "a"), context_fn=contexts)

    def twin(self) -> Rig:
        return SelectiveRig(self.kit, self.use_reentrant)

    def dropped(self, x: torch.Tensor) -> torch.Tensor:
        parts = []
        for name, row in zip(self.rows, x.unbind(0), strict=True):
            with self.on(name):
                if self.kit.real:
                    parts.append(self.kit.drop(row + 0 * torch.rand_like(row)))
                else:
                    row = row + 0 * _ops.saved(row.detach())
                    parts.append(row * _ops.drawn(row.detach()))
        return torch.stack(parts)


@both_engines
@pytest.mark.parametrize("reseeded", [False, True], ids=["", "reseeded"])
def test_b12_e2_kept_draw_still_moves_its_stream(kit: Kit, use_reentrant: bool, reseeded: bool) -> None:
    def scenario(rig: Rig) -> Outcome:
        halfway = (lambda: rig.seed(4321)) if reseeded else None
        return Split(rig, halfway=halfway).run(ORDERS["mixed"])

    assert_like_plain(kit, use_reentrant, scenario, SelectiveRig)


@both_engines
@pytest.mark.parametrize("drawn", [False, True], ids=["at the start of a seed", "behind other draws"])
def test_b12_e7_eager_backward_of_a_captured_forward_is_right_or_refused(
    kit: Kit, use_reentrant: bool, drawn: bool
) -> None:
    rig = SelectiveRig(kit, use_reentrant)
    twin = rig.twin()
    kit.aside(lambda: twin.checkpoint(twin.body, twin.input()).sum().backward())
    x, grad, graph = rig.input(), kit.ones(len(rig.rows), kit.size), kit.graph()
    with kit.capturing(graph):
        y = rig.checkpoint(rig.body, x)
    rig.seed(3)
    if drawn:
        rig.draws()
    graph.replay()
    try:
        y.backward(grad)
    except (RecomputeMismatchError, UnsupportedCaptureError) as error:
        print(f"refused: {str(error).splitlines()[0]}")
        return
    assert rig.proof.runs == 2
    assert x.grad is not None
    wrong = int(((y != 0) != (x.grad != 0)).sum())
    assert wrong == 0, f"{wrong} of {y.numel()} elements are wrong, without an error"
