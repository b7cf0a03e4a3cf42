# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Worker of test_saved_activations.py (D10): inputs of regions that are spread over a group until backward."""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from _ranks import gathers, run_cases
from torch.nn import functional as F

from _proof import Proof, assert_one_mask, differing
from _regions import OUTSIDE, flags, grad_of, leaf, moved, new_tracker, stream_values
from transformer_engine_ext.pytorch import te_checkpoint
from transformer_engine_ext.pytorch.distributed import gather_split_1d_tensor, split_tensor_into_1d_equal_chunks

DEVICE = sys.argv[1] if len(sys.argv) > 1 else "cpu"


def base(*shape: int) -> torch.Tensor:
    """Make a leaf with the same numbers on all ranks, as a tensor-parallel region's input has them."""
    return leaf(*shape, device=DEVICE)


# Inputs by how they lie in memory. Each is a function of a leaf, so that the leaf's gradient can be compared.
SHAPES: dict[str, tuple[tuple[int, ...], Callable[[torch.Tensor], torch.Tensor]]] = {
    "divisible": ((4, 6), lambda x: x * 1),
    "not divisible": ((5, 3), lambda x: x * 1),
    "smaller than the group": ((1,), lambda x: x * 1),
    "no dimensions": ((), lambda x: x * 1),
    "no elements": ((0, 3), lambda x: x * 1),
    "transposed": ((5, 3), lambda x: (x * 1).t()),
    "permuted": ((2, 3, 5), lambda x: (x * 1).permute(2, 0, 1)),
    "channels last": ((2, 3, 4, 5), lambda x: (x * 1).contiguous(memory_format=torch.channels_last)),
    "every other column": ((4, 6), lambda x: (x * 1)[:, ::2]),
    "with an offset": ((6, 3), lambda x: (x * 1)[1:]),
    "expanded": ((1, 7), lambda x: (x * 1).expand(3, 7)),
    "the leaf itself": ((5, 3), lambda x: x),
    "a result that an operator keeps": ((5, 3), lambda x: x.exp()),
    "bfloat16": ((5, 3), lambda x: x.bfloat16()),
    "double": ((5, 3), lambda x: x.double()),
}


def spread_over(group: Any, prepare: Callable[[torch.Tensor], torch.Tensor], shape: tuple[int, ...]) -> None:
    """One region on one input: less is held between the passes, values and gradients are those of a plain call."""
    proof = Proof()

    def region(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        proof.ran()
        return proof.watch(x.exp()).sin() * w

    x, w = base(*shape), base(1)
    plain = region(prepare(x), w).float()
    expected = torch.autograd.grad(plain.sum(), (x, w))
    plain = plain.detach()

    proof.runs, proof._watched = 0, []
    hidden = prepare(x)
    before = hidden.detach().clone()
    strides = hidden.stride()
    y = te_checkpoint(region, hidden, w, distribute_saved_activations=True, tp_group=group)
    proof.after_forward()
    assert differing(y.float().detach(), plain) == 0
    size = dist.get_world_size(group)
    share = -(-before.numel() // size)
    if size > 1:
        held = hidden.untyped_storage().nbytes() // hidden.element_size()
        assert held <= share, f"{held} elements are held between the passes, {share} of {before.numel()} suffice"
    y.float().sum().backward()
    proof.after_backward()
    assert hidden.shape == before.shape
    assert differing(hidden.detach(), before) == 0, "the caller's input is not whole again"
    assert hidden.stride() == strides or not before.numel()
    for tensor, gradient in zip((x, w), expected, strict=True):
        assert torch.allclose(grad_of(tensor), gradient, rtol=1e-6), (grad_of(tensor) - gradient).abs().max()


def case_any_shape() -> None:
    for name, (shape, prepare) in SHAPES.items():
        if name in ("every other column", "expanded"):
            continue  # see case_strides_with_gaps
        try:
            spread_over(None, prepare, shape)
        except Exception as error:
            raise AssertionError(f"input {name!r}: {error}") from error


def case_strides_with_gaps() -> None:
    """Views that skip memory, or reuse it: whole again in shape and values; the layout may become a dense one."""
    for name in ("every other column", "expanded"):
        shape, prepare = SHAPES[name]
        proof, x = Proof(), base(*shape)

        def region(x: torch.Tensor, proof: Proof = proof) -> torch.Tensor:
            proof.ran()
            return proof.watch(x.exp()).sin()

        expected = torch.autograd.grad(prepare(x).exp().sin().sum(), x)[0]
        hidden = prepare(x)
        before = hidden.detach().clone()
        y = te_checkpoint(region, hidden, distribute_saved_activations=True)
        proof.after_forward()
        y.sum().backward()
        proof.after_backward()
        assert differing(hidden.detach(), before) == 0, name
        assert torch.allclose(grad_of(x), expected), name


def case_group_of_its_own() -> None:
    """A group beside the world with all of its ranks, and groups of one rank, where there is nothing to spread."""
    everyone = dist.new_group(list(range(dist.get_world_size())))
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    for group in (everyone, alone):
        spread_over(group, lambda x: x * 1, (5, 3))


def case_pairs_of_four() -> None:
    """Two groups of two ranks each, with different inputs; a rank's place in its group is not its rank."""
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    for _ in range(2):
        spread_over(pairs[rank // 2], lambda x: x * (1 + rank // 2), (5, 3))
    crossed = [dist.new_group([0, 3]), dist.new_group([1, 2])]
    spread_over(crossed[0 if rank in (0, 3) else 1], lambda x: x * 1, (3, 3))
    spread_over(None, lambda x: x * 1, (3, 3))


def region_of(proof: Proof) -> Callable[..., torch.Tensor]:
    def region(x: torch.Tensor, w: Any = None, **named: Any) -> torch.Tensor:
        proof.ran()
        y = proof.watch(x.exp()).sin()
        return y if w is None else y * w

    return region


def case_input_without_grad() -> None:
    """The first tensor needs no gradient, a later one does: the first is spread all the same, and whole again after."""
    proof, w = Proof(), base(1)
    x = base(5, 3).detach()
    before = x.clone()
    y = te_checkpoint(region_of(proof), x, w, distribute_saved_activations=True)
    assert proof.runs == 1
    assert x.untyped_storage().nbytes() <= 8 * x.element_size()
    y.sum().backward()
    proof.after_backward()
    assert x.grad is None
    assert not x.requires_grad
    assert differing(x, before) == 0
    assert torch.allclose(grad_of(w), before.exp().sin().sum())


def case_only_parameters_need_grad() -> None:
    """Then the non-reentrant engine runs, which spreads nothing; the caller's tensor is never touched."""
    proof, w = Proof(), base(1)
    x = base(5, 3).detach()
    before = x.clone()
    y = te_checkpoint(lambda x: region_of(proof)(x, w), x, distribute_saved_activations=True)
    proof.after_forward()
    assert differing(x, before) == 0
    y.sum().backward()
    proof.after_backward()
    assert differing(x, before) == 0
    assert torch.allclose(grad_of(w), before.exp().sin().sum())


def case_no_backward() -> None:
    """The output is right, nothing is held when it goes, no collective is missing, and the tensor serves again."""
    proof, x = Proof(), base(5, 3)
    hidden = x * 1
    before = hidden.detach().clone()
    y = te_checkpoint(region_of(proof), hidden, distribute_saved_activations=True)
    proof.after_forward()
    expected = before.exp().sin()
    assert differing(y.detach(), expected) == 0
    ref = weakref.ref(y)
    del y
    assert ref() is None
    again = Proof()
    other = x * 1
    y = te_checkpoint(region_of(again), other, distribute_saved_activations=True)
    y.sum().backward()
    again.after_backward()
    assert differing(other.detach(), before) == 0
    assert proof.runs == 1


def case_one_tensor_in_two_regions() -> None:
    """The second region gets the tensor while the first one holds it spread; both gradients arrive."""
    x = base(5, 3)
    hidden = x * 1
    before = hidden.detach().clone()
    proofs = [Proof(), Proof()]
    outputs = [te_checkpoint(region_of(proof), hidden, distribute_saved_activations=True) for proof in proofs]
    for proof, y in zip(proofs, outputs, strict=True):
        assert proof.survivors() == []
        assert differing(y.detach(), before.exp().sin()) == 0
    (outputs[0].sum() + 2 * outputs[1].sum()).backward()
    for proof in proofs:
        proof.after_backward()
    assert differing(hidden.detach(), before) == 0
    assert torch.allclose(grad_of(x), 3 * torch.autograd.grad(x.exp().sin().sum(), x)[0])


def case_chain_of_regions() -> None:
    """A model of layers: each layer's input is the one before's output, all are spread at once, all come back."""
    x, hidden, proofs, inputs = base(5, 3), None, [Proof() for _ in range(4)], []
    hidden = x * 1
    for proof in proofs:
        inputs.append((hidden, hidden.detach().clone()))
        hidden = te_checkpoint(region_of(proof), hidden, distribute_saved_activations=True)
        proof.after_forward()
    hidden.sum().backward()
    expected = x
    for proof in proofs:
        proof.after_backward()
        expected = expected.exp().sin()
    for tensor, before in inputs:
        assert differing(tensor.detach(), before) == 0
    assert torch.allclose(grad_of(x), torch.autograd.grad(expected.sum(), x)[0])


def case_retain_graph() -> None:
    proof, x = Proof(), base(5, 3)
    hidden = x * 1
    before = hidden.detach().clone()
    with gathers(0):
        y = te_checkpoint(region_of(proof), hidden, distribute_saved_activations=True)
    proof.after_forward()
    expected = torch.autograd.grad(x.exp().sin().sum(), x)[0]
    for runs in (2, 3):
        x.grad = None
        with gathers(1 if runs == 2 else 0):  # the second backward finds it whole
            y.sum().backward(retain_graph=True)
        proof.after_backward(runs)
        assert differing(hidden.detach(), before) == 0
        assert torch.allclose(grad_of(x), expected)


def case_error_in_recompute() -> None:
    """The exception arrives, the input is whole, and a second try gives the gradient."""
    proof, x = Proof(), base(5, 3)
    hidden = x * 1
    before = hidden.detach().clone()

    def failing(x: torch.Tensor) -> torch.Tensor:
        y = region_of(proof)(x)
        if proof.runs == 2:
            raise KeyError("recompute")
        return y

    y = te_checkpoint(failing, hidden, distribute_saved_activations=True)
    proof.after_forward()
    try:
        y.sum().backward(retain_graph=True)
    except KeyError:
        pass
    else:
        raise AssertionError("the error did not arrive")
    assert differing(hidden.detach(), before) == 0
    assert flags() == OUTSIDE
    y.sum().backward()
    proof.after_backward(runs=3)
    assert torch.allclose(grad_of(x), torch.autograd.grad(x.exp().sin().sum(), x)[0])


def case_masks_and_streams() -> None:
    """Dropout under a stream that differs per rank: each rank's gradient has its own forward's mask."""
    tracker, proof = new_tracker("a", device=DEVICE, seed=10 + dist.get_rank()), Proof()

    def region(x: torch.Tensor) -> torch.Tensor:
        proof.ran()
        with tracker.fork("a"):
            mask = F.dropout(torch.ones_like(x), 0.5)
        return proof.watch(mask) * x

    x = torch.ones(33, 7, device=DEVICE, requires_grad=True)
    y = te_checkpoint(
        region, x, distribute_saved_activations=True, get_rng_state_tracker=lambda: tracker, use_reentrant=True
    )
    proof.after_forward()
    before = stream_values(tracker)
    y.sum().backward()
    proof.after_backward()
    assert_one_mask(y, x.grad)
    assert moved(before, stream_values(tracker)) == []


def case_first_tensor_is_not_the_first_argument() -> None:
    for pack in (lambda x: ((None, x), {}), lambda x: (("text", [x]), {}), lambda x: ((3,), {"x": x})):
        proof, x = Proof(), base(5, 3)

        def region(other: Any, x: Any, proof: Proof = proof) -> torch.Tensor:
            return region_of(proof)(x[0] if isinstance(x, list) else x)

        hidden = x * 1
        before = hidden.detach().clone()
        args, kwargs = pack(hidden)
        y = te_checkpoint(region, *args, distribute_saved_activations=True, **kwargs)
        proof.after_forward()
        y.sum().backward()
        proof.after_backward()
        assert differing(hidden.detach(), before) == 0
        assert torch.allclose(grad_of(x), torch.autograd.grad(x.exp().sin().sum(), x)[0])


def case_nested_regions() -> None:
    outer_proof, inner_proof, x = Proof(), Proof(), base(5, 3)

    def outer(x: torch.Tensor) -> torch.Tensor:
        outer_proof.ran()
        return te_checkpoint(
            region_of(inner_proof), outer_proof.watch(x.exp()).cos(), distribute_saved_activations=True
        )

    hidden = x * 1
    before = hidden.detach().clone()
    y = te_checkpoint(outer, hidden, distribute_saved_activations=True)
    outer_proof.after_forward()
    y.sum().backward()
    outer_proof.after_backward()
    inner_proof.after_backward(runs=3)
    assert differing(hidden.detach(), before) == 0
    assert torch.allclose(grad_of(x), torch.autograd.grad(x.exp().cos().exp().sin().sum(), x)[0])


def case_nonreentrant_warns() -> None:
    """As TE: no effect in that engine, said so once per call, at the caller's line."""
    proof, x = Proof(), base(5, 3)
    hidden = x * 1
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        y = te_checkpoint(region_of(proof), hidden, distribute_saved_activations=True, use_reentrant=False)
    assert [w.category for w in caught] == [UserWarning]
    assert caught[0].filename == __file__
    proof.after_forward()
    assert hidden.shape == (5, 3)
    y.sum().backward()
    proof.after_backward()


def case_split_and_gather() -> None:
    """TE's two helpers: flat shares of equal size, views or copies, and their inverse."""
    size, rank = dist.get_world_size(), dist.get_rank()
    x = torch.arange(6.0 * size, device=DEVICE).view(3, -1)
    chunk = split_tensor_into_1d_equal_chunks(x, dist.group.WORLD)
    assert torch.equal(chunk, torch.arange(6.0 * rank, 6.0 * rank + 6, device=DEVICE))
    assert chunk.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    copied = split_tensor_into_1d_equal_chunks(x, dist.group.WORLD, new_buffer=True)
    assert torch.equal(copied, chunk)
    assert copied.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
    assert copied.untyped_storage().nbytes() == 6 * copied.element_size()
    assert torch.equal(gather_split_1d_tensor(chunk, dist.group.WORLD), x.view(-1))
    assert torch.equal(split_tensor_into_1d_equal_chunks(x.t()).sort().values, split_flat(x.t(), size, rank))


def split_flat(x: torch.Tensor, size: int, rank: int) -> torch.Tensor:
    return x.reshape(-1).chunk(size)[rank].sort().values


CASES = {
    "d10 any shape and dtype": case_any_shape,
    "d10 strides with gaps": case_strides_with_gaps,
    "d10 group of its own": case_group_of_its_own,
    "d10 input without grad": case_input_without_grad,
    "d10 only parameters need grad": case_only_parameters_need_grad,
    "d10 no backward": case_no_backward,
    "d10 one tensor in two regions": case_one_tensor_in_two_regions,
    "d10 chain of regions": case_chain_of_regions,
    "d10 retain_graph": case_retain_graph,
    "d10 error in recompute": case_error_in_recompute,
    "d10 masks and streams": case_masks_and_streams,
    "d10 first tensor is not the first argument": case_first_tensor_is_not_the_first_argument,
    "d10 nested regions": case_nested_regions,
    "d10 nonreentrant warns": case_nonreentrant_warns,
    "d10 split and gather": case_split_and_gather,
}
FOUR_RANKS = {"d10 pairs of four": case_pairs_of_four}

if __name__ == "__main__":
    torch.manual_seed(0)
    run_cases(FOUR_RANKS if "four" in sys.argv[2:] else CASES)
