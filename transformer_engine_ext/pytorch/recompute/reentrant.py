# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""The reentrant engine: one autograd node whose backward runs the function again and a backward of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from transformer_engine_ext.errors import (
    CheckpointArgumentError,
    NotDifferentiableError,
    ReentrantGradError,
    SavedTensorMismatchError,
)
from transformer_engine_ext.pytorch.recompute import debug
from transformer_engine_ext.pytorch.recompute.ambient import autocast_cache
from transformer_engine_ext.pytorch.recompute.arguments import (
    ONE_TENSOR,
    PackedCall,
    TensorList,
    hidden_tensor,
    pack,
    unpack,
    unpack_call,
)
from transformer_engine_ext.pytorch.recompute.inputs import version_of
from transformer_engine_ext.pytorch.recompute.region import Region
from transformer_engine_ext.pytorch.recompute.saved_activations import Distributed

__all__ = ["run_reentrant"]

_engine = torch.autograd.Variable._execution_engine
_run_backward = _engine.run_backward
_may_recompute = _engine.is_checkpoint_valid

_OTHER_ENGINE = "Use te_checkpoint(..., use_reentrant=False), which supports it"


class _Call:
    """What the node needs beside tensors."""

    __slots__ = ("args", "changed", "distributed", "kwargs", "outputs", "packed", "region")

    def __init__(
        self,
        region: Region,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        packed: PackedCall,
        distributed: Distributed | None,
    ) -> None:
        self.region = region
        # The originals, until the forward has run: it gets the very objects that the caller passed.
        self.args: Sequence[Any] = args
        self.kwargs = kwargs
        self.packed = packed
        self.distributed = distributed
        self.outputs: Any = None
        self.changed: list[int] = []


class _Reentrant(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        region = call.region
        args, kwargs, call.args, call.kwargs = call.args, call.kwargs, (), {}
        # version_of, written out
        versions = [0 if tensor.is_inference() else tensor._version for tensor in tensors]
        # See Note [Casts made without grad stay out of the cache]
        if region.ambient.casts:
            with autocast_cache(False):
                result = region.forward(args, kwargs)
        else:
            result = region.forward(args, kwargs)
        if region.snapshot is not None:
            region.snapshot.finish()
        call.changed = [i for i, tensor in enumerate(tensors) if version_of(tensor) != versions[i]]
        outputs: Sequence[Tensor]
        if type(result) is Tensor:
            call.outputs, outputs = ONE_TENSOR, (result,)
        else:
            outputs = TensorList()
            call.outputs = pack(result, outputs)
            _refuse_hidden(call.outputs)
        ctx.call = call
        # A gradient that nobody asked for stays None instead of a tensor of zeros.
        # What set_materialize_grads and save_for_backward do.
        ctx.materialize_grads = False
        # See Note [The caller's input is spread in place]
        ctx.to_save = tensors if call.distributed is None else tuple(call.distributed.scatter(tensors))
        return tuple([_connectable(output, tensors) if output.requires_grad else output for output in outputs])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        if call.changed or torch.is_grad_enabled() or not _may_recompute():
            _refuse_unsupported(call)
        tensors: Sequence[Tensor] = ctx.saved_tensors
        if call.distributed is not None:
            tensors = call.distributed.gather(tensors)
        inputs = list(map(_input, tensors, ctx.needs_input_grad[1:]))
        result = call.region.recompute(*unpack_call(call.packed, inputs))
        outputs: Sequence[Tensor]
        if type(result) is Tensor:
            outputs = (result,)
        else:
            outputs = TensorList()
            pack(result, outputs)
        if len(outputs) != len(grads):
            error = SavedTensorMismatchError(
                f"the recompute of a checkpointed region returned {len(outputs)} tensors, its forward {len(grads)}; "
                "the function must not depend on anything that changes between forward and backward"
            )
            debug.explain(error)
            raise error
        roots: list[Tensor] = []
        root_grads: list[Tensor] = []
        for output, grad in zip(outputs, grads, strict=True):
            if grad is not None and output.requires_grad:
                roots.append(output)
                root_grads.append(grad)
        if roots:
            # torch.autograd.backward checks and wraps what this calls; that costs about 20 us and can add nothing here.
            _run_backward(tuple(roots), tuple(root_grads), False, False, (), True, True)
        elif any(grad is not None for grad in grads) and not any(output.requires_grad for output in outputs):
            raise NotDifferentiableError(
                "none of output has requires_grad=True, this checkpoint() is not necessary: a gradient arrived for "
                "the region's outputs, but nothing in its recompute leads from an output to an input or a parameter. "
                "Call the function directly, or check for detach() and no_grad() inside"
            )
        return (None, *[tensor.grad if tensor.requires_grad else None for tensor in inputs])


def _refuse_unsupported(call: _Call) -> None:
    if not _may_recompute():
        raise ReentrantGradError(
            "Checkpointing is not compatible with .grad(), please use .backward() if possible: a reentrant region "
            f"accumulates parameter gradients in a backward of its own, which torch.autograd.grad and inputs= cannot "
            f"see. {_OTHER_ENGINE}"
        )
    if torch.is_grad_enabled():
        raise ReentrantGradError(
            "a reentrant region cannot be differentiated twice: backward was called with create_graph=True, and the "
            f"gradients that the region's inner backward accumulates have no graph. {_OTHER_ENGINE}"
        )
    if call.changed:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: the "
            f"checkpointed function changed its tensor argument number {call.changed[0]} in place, and the recompute "
            "would start from the changed values. Change a clone inside the function instead"
        )


def _refuse_hidden(packed: Any) -> None:
    # Made without grad, tensors inside an opaque result would come out cut off from the graph, without a word.
    hidden = hidden_tensor(packed)
    if hidden is not None:
        raise CheckpointArgumentError(
            f"the checkpointed function returned an object with a tensor in {hidden}, which the reentrant engine "
            "cannot connect to the graph. Return tensors in a tuple, list, dict or dataclass, register the class with "
            "torch.utils._pytree.register_pytree_node, or use use_reentrant=False"
        )


def _input(tensor: Tensor, needs_grad: bool) -> Tensor:
    """Return a tensor argument for the recompute, with what users hung on it."""
    twin = tensor.detach().requires_grad_(needs_grad)
    if tensor.__dict__:
        twin.__dict__.update(tensor.__dict__)
    return twin


def _connectable(output: Tensor, given: Sequence[Tensor]) -> Tensor:
    """Return an output with a gradient so that a node may be set on it: a parameter must stay the leaf that it is."""
    if any(output is tensor for tensor in given):
        return output
    if output.grad_fn is not None:  # made with grad enabled inside: its graph must not live on with the output
        return output.detach()
    # A parameter, or a view of an argument: not detached, so that autograd refuses to change it in place, which would
    # bypass the graph of what it shares its memory with.
    return output.view_as(output)


# Function.apply looks for functorch transforms and binds defaults, about 8 us; its C++ part does the work.
_raw_apply: Any = super(torch.autograd.Function, _Reentrant).apply


def run_reentrant(
    region: Region,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    packed: PackedCall,
    tensors: Sequence[Tensor],
    distributed: Distributed | None,
) -> Any:
    """Run a region's forward on this engine.

    Parameters
    ----------
    region : Region
        The region.
    args, kwargs : sequence, dict
        The original arguments.
    packed : tuple
        The same, with the tensors taken out by ``pack_call``.
    tensors : sequence of torch.Tensor
        Those tensors; at least one requires a gradient.
    distributed : Distributed or None
        Keeps the first argument spread over a group, with ``distribute_saved_activations``.

    Returns
    -------
    object
        What the function returned, its tensors connected to the region's node.
    """
    # See Note [A region is independent of its neighbours]
    if torch._C._are_functorch_transforms_active():
        raise CheckpointArgumentError(
            "a region cannot run under torch.func transforms (vmap, grad, jvp): they replace the tensors that backward "
            "would need. Call the function directly there, or use torch.autograd with use_reentrant=False"
        )
    call = _Call(region, args, kwargs, packed, distributed)
    outputs: tuple[Tensor, ...] = _raw_apply(call, *tensors)
    return outputs[0] if call.outputs is ONE_TENSOR else unpack(call.outputs, outputs)
