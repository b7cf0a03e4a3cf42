# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""B10: saved-tensor hooks of the user (offloading, compression) around a region and inside one.

As in torch's non-reentrant engine a user's hooks see the inputs that a region keeps, and nothing from inside it; the
reentrant engine keeps its inputs through ``save_for_backward`` and so shows them the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from _helpers import requires_cuda
from _proof import Proof, assert_one_mask, differing
from _regions import both_engines, grad_of, leaf
from transformer_engine_ext.pytorch import te_checkpoint


class _Recorder(saved_tensors_hooks):
    """Counts what is packed and unpacked, and keeps a clone in place of the tensor, as offloading does."""

    def __init__(self) -> None:
        self.packed: list[tuple[int, ...]] = []
        self.unpacked = 0
        super().__init__(self._pack, self._unpack)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        self.packed.append(tuple(tensor.shape))
        return tensor.detach().clone()

    def _unpack(self, kept: torch.Tensor) -> torch.Tensor:
        self.unpacked += 1
        return kept


class _Region:
    def __init__(self, w: torch.Tensor) -> None:
        self.proof, self.w = Proof(), w

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.proof.ran()
        return self.proof.watch((x @ self.w).exp()).sin() @ self.w


@both_engines
def test_b10_hooks_around_a_region_see_its_inputs_only(use_reentrant: bool) -> None:
    x, w = leaf(3, 4), leaf(4, 4, seed=2)
    region, recorder = _Region(w), _Recorder()
    expected = torch.autograd.grad(region(x).sum(), (x, w))
    region.proof = Proof()
    with recorder:
        y = te_checkpoint(region, x, use_reentrant=use_reentrant)
    region.proof.after_forward()
    assert recorder.packed == [(3, 4)]
    y.sum().backward()
    region.proof.after_backward()
    assert recorder.packed == [(3, 4)], "the recompute's tensors went to hooks of the forward"
    assert recorder.unpacked == 1
    assert [differing(grad_of(t), g) for t, g in zip((x, w), expected, strict=True)] == [0, 0]


@pytest.mark.parametrize("arguments", ["one", "two", "keyword"])
def test_b10_hooks_see_as_many_tensors_as_torchs(arguments: str) -> None:
    """Non-reentrant, side by side; torch keeps keyword tensors without showing them; ours shows all that it keeps."""
    seen = []
    for checkpoint in (torch.utils.checkpoint.checkpoint, te_checkpoint):
        x, other = leaf(3), leaf(3, seed=2)
        proof, recorder = Proof(), _Recorder()

        def region(x: torch.Tensor, other: torch.Tensor = other, proof: Proof = proof) -> torch.Tensor:
            proof.ran()
            return proof.watch(x.exp()).sin() * other

        with recorder:
            if arguments == "one":
                y = checkpoint(region, x, use_reentrant=False)
            elif arguments == "two":
                y = checkpoint(region, x, other, use_reentrant=False)
            else:
                y = checkpoint(region, x, use_reentrant=False, other=other)
        proof.after_forward()
        y.sum().backward()
        proof.after_backward()
        packed = [
            shape for shape in recorder.packed if shape != (0,)
        ]  # torch before 2.13 also saves a dummy of its own
        seen.append((packed, grad_of(x), grad_of(other)))
    assert differing(seen[1][1], seen[0][1]) == differing(seen[1][2], seen[0][2]) == 0
    assert seen[1][0] == [(3,)] * (1 if arguments == "one" else 2)
    if arguments != "keyword":
        assert seen[0][0] == seen[1][0]


@both_engines
def test_b10_hooks_around_backward_see_nothing_of_the_recompute(use_reentrant: bool) -> None:
    """As torch: hooks that are active where backward is called are not those of the forward."""
    region, x, recorder = _Region(leaf(4, 4, seed=2)), leaf(3, 4), _Recorder()
    y = te_checkpoint(region, x, use_reentrant=use_reentrant)
    region.proof.after_forward()
    loss = y.sum()
    with recorder:
        loss.backward()
    region.proof.after_backward()
    torch_recorder, torch_region = _Recorder(), _Region(leaf(4, 4, seed=2))
    theirs = torch.utils.checkpoint.checkpoint(torch_region, leaf(3, 4), use_reentrant=use_reentrant).sum()
    with torch_recorder:
        theirs.backward()
    assert recorder.packed == torch_recorder.packed


def _hooks_inside(checkpoint: Callable[..., Any], use_reentrant: bool) -> tuple[list[Any], torch.Tensor]:
    """Run a region that opens hooks of its own; return what these saw per execution, and the gradient."""
    proof, recorders, x = Proof(), [], leaf(4)

    def region(x: torch.Tensor) -> torch.Tensor:
        proof.ran()
        recorders.append(_Recorder())
        y = proof.watch(x.exp())
        with recorders[-1]:
            z = y.sin()
        return z.cos()

    y = checkpoint(region, x, use_reentrant=use_reentrant)
    proof.after_forward()
    y.sum().backward()
    proof.after_backward()
    return [(recorder.packed, recorder.unpacked) for recorder in recorders], grad_of(x)


@both_engines
def test_b10_hooks_inside_a_region(use_reentrant: bool) -> None:
    """Hooks that the function opens itself are inside the region's own: they see what they see under torch's engine."""
    ours, gradient = _hooks_inside(te_checkpoint, use_reentrant)
    theirs, _ = _hooks_inside(torch.utils.checkpoint.checkpoint, use_reentrant)
    assert ours == theirs
    assert len(ours) == 2
    x = leaf(4)
    assert differing(gradient, torch.autograd.grad(x.exp().sin().cos().sum(), x)[0]) == 0


@both_engines
def test_b10_hooks_that_pack_to_numbers(use_reentrant: bool) -> None:
    """Hooks may pack to something that is no tensor (a file's name, a key): the region asks them, not the tensor."""
    store: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> int:
        store[len(store)] = tensor.detach().clone()
        return len(store) - 1

    region, x = _Region(leaf(4, 4, seed=2)), leaf(3, 4)
    expected = torch.autograd.grad(region(x).sum(), x)[0]
    region.proof = Proof()
    hidden = x * 1
    with saved_tensors_hooks(pack, lambda key: store.pop(key)):
        y = te_checkpoint(region, hidden, use_reentrant=use_reentrant)
    del hidden
    region.proof.after_forward()
    assert len(store) == 1
    y.sum().backward()
    region.proof.after_backward()
    assert store == {}
    assert differing(grad_of(x), expected) == 0


@both_engines
def test_b10_disabled_hooks(use_reentrant: bool) -> None:
    """``disable_saved_tensors_hooks`` around a non-reentrant region is torch's error; the reentrant one needs none."""
    region, x = _Region(leaf(4, 4, seed=2)), leaf(3, 4)
    if use_reentrant:
        with torch.autograd.graph.disable_saved_tensors_hooks("not now"):
            y = te_checkpoint(region, x, use_reentrant=True)
        region.proof.after_forward()
        y.sum().backward()
        region.proof.after_backward()
        return
    with torch.autograd.graph.disable_saved_tensors_hooks("not now"), pytest.raises(RuntimeError, match="not now"):
        te_checkpoint(region, x, use_reentrant=False)
    region.proof = Proof()
    y = te_checkpoint(region, x, use_reentrant=False)
    region.proof.after_forward()
    y.sum().backward()
    region.proof.after_backward()


def _mask_region(proof: Proof) -> Callable[[torch.Tensor], torch.Tensor]:
    def region(x: torch.Tensor) -> torch.Tensor:
        proof.ran()
        return proof.watch(F.dropout(torch.ones_like(x), 0.5)) * x

    return region


@both_engines
@pytest.mark.parametrize("pin_memory", [False, pytest.param(True, marks=requires_cuda)])
def test_b10_save_on_cpu(use_reentrant: bool, pin_memory: bool) -> None:
    """torch's offloading hooks around a region: exact, and on CUDA the input leaves the device."""
    device = "cuda" if pin_memory else "cpu"
    proof, x = Proof(), torch.ones(256, device=device, requires_grad=True)
    with torch.autograd.graph.save_on_cpu(pin_memory=pin_memory):
        y = te_checkpoint(_mask_region(proof), x, use_reentrant=use_reentrant)
    proof.after_forward()
    y.sum().backward()
    proof.after_backward()
    assert_one_mask(y, x.grad)


@both_engines
def test_b10_offload_wrapper_outside_a_checkpointed_module(use_reentrant: bool) -> None:
    """The wrapper of ``torch.distributed.algorithms``: offloading and checkpointing combined."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper, offload_wrapper

    proof = Proof()

    class Mask(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return _mask_region(proof)(x)

    options: dict[str, Any] = {"checkpoint_fn": te_checkpoint, "use_reentrant": use_reentrant}
    module = offload_wrapper(checkpoint_wrapper(Mask(), **options))
    x = torch.ones(256, requires_grad=True)
    y = module(x)
    proof.after_forward()
    y.sum().backward()
    proof.after_backward()
    assert_one_mask(y, x.grad)


def test_b10_engines_hooks_say_which_hooks_are_the_users() -> None:
    """Non-reentrant, as selective checkpointing asks since torch 2.14; see Note [Hooks that are not the user's].

    It is the walk that torch makes: past the hooks of checkpoints, to those of the user.
    """
    top = torch._C._autograd._top_saved_tensors_default_hooks
    seen: list[object] = []

    def users() -> object:
        hooks: Any = top(False)
        while hooks is not None and getattr(hooks[0], "_checkpoint_internal", False):
            hooks = hooks[0]._user_hooks
        return None if hooks is None else hooks[0]

    def inner(x: torch.Tensor) -> torch.Tensor:
        seen.append(users())
        return x.sin().exp()

    def outer(x: torch.Tensor) -> torch.Tensor:
        seen.append(users())
        return te_checkpoint(inner, x, use_reentrant=False).cos()

    def offload(tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    x = torch.ones(3, requires_grad=True)
    te_checkpoint(outer, x, use_reentrant=False).sum().backward()
    assert seen == [None] * len(seen)
    assert len(seen) >= 4
    seen.clear()
    with torch.autograd.graph.saved_tensors_hooks(offload, offload):
        y = te_checkpoint(outer, x, use_reentrant=False)
    assert seen == [offload, offload]
    y.sum().backward()
    assert set(seen[2:]) == {None}
    assert users() is None
    seen.clear()
    y = te_checkpoint(outer, x, use_reentrant=False)
    with torch.autograd.graph.saved_tensors_hooks(offload, offload):
        y.sum().backward()  # a recompute is surrounded by what surrounds its backward
    assert seen[:2] == [None, None]
    assert set(seen[2:]) == {offload}
