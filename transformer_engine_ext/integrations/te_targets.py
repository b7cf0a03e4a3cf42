# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""What is replaced in ``transformer_engine.pytorch.distributed``."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch import Generator

from transformer_engine_ext.integrations.contexts import contexts_for
from transformer_engine_ext.integrations.local_graphs import prefers_non_reentrant
from transformer_engine_ext.integrations.plan import Plan
from transformer_engine_ext.integrations.tracker_states import carrying
from transformer_engine_ext.pytorch import CudaRNGStatesTracker, te_checkpoint
from transformer_engine_ext.pytorch.recompute.legacy import take_positional_options
from transformer_engine_ext.pytorch.rng import get_all_rng_states, set_all_rng_states
from transformer_engine_ext.pytorch.rng.registry import register_tracker, unregister_trackers

__all__ = ["plan_transformer_engine"]

# Of the class object itself, not of what its instances do.
_OF_THE_CLASS = frozenset(vars(type("_Empty", (), {}))) | {
    "__annotations__",
    "__annotate_func__",
    "__static_attributes__",
}

# Between a caller and the replacement: this package's code, and the decorators around the original.
_NOT_THE_CALLERS = ("transformer_engine_ext/integrations/", "/torch/", "transformer_engine/pytorch/distributed.py")


def plan_transformer_engine(distributed: Any) -> Plan:
    """Plan the replacements.

    Parameters
    ----------
    distributed : module
        ``transformer_engine.pytorch.distributed``.

    Returns
    -------
    Plan
        Not applied yet.
    """
    plan = Plan()
    plan.code(distributed, "checkpoint", lambda original: _checkpoint)
    plan.code(distributed, "get_all_rng_states", lambda original: _all_rng_states)
    plan.code(distributed, "set_all_rng_states", lambda original: _setter(original))
    if isinstance(getattr(distributed, "CudaRNGStatesTracker", None), type):
        # See Note [The class stays, its methods change]
        _plan_tracker(plan, distributed, distributed.CudaRNGStatesTracker)
    else:
        plan.skip(f"{distributed.__name__}.CudaRNGStatesTracker", "this version has no such class")
    contexts_for(plan, distributed)
    return plan


def _checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    base = getattr(sys.modules.get("transformer_engine.pytorch.module.base"), "TransformerEngineBaseModule", None)
    if base is not None and isinstance(function, base):
        # As Transformer Engine does: what is recomputed need not be scattered over an FSDP group.
        for name, value in (("fsdp_wrapped", False), ("fsdp_group", None)):
            getattr(function, "fast_setattr", function.__setattr__)(name, value)
    if len(args) > 3 and isinstance(args[0], bool):
        args, positional = take_positional_options(function, args, kwargs, stacklevel=_callers_level())
        if positional is not None:
            names = ("distribute_saved_activations", "get_rng_state_tracker", "tp_group")
            kwargs.update(zip(names, positional, strict=True))
    if prefers_non_reentrant():
        kwargs["use_reentrant"] = False
        if kwargs.get("distribute_saved_activations"):
            kwargs["distribute_saved_activations"] = False
    return te_checkpoint(function, *args, **kwargs)


def _callers_level() -> int:
    """Return the ``stacklevel`` of the first frame that is the caller's, counted from a function called next."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and any(part in frame.f_code.co_filename for part in _NOT_THE_CALLERS):
        frame, level = frame.f_back, level + 1
    return level


def _all_rng_states() -> dict[str, Any]:
    # Callers register each of them with a CUDA graph, so streams of other devices are none of their business.
    return {
        name: state
        for name, state in get_all_rng_states().items()
        if not isinstance(state, Generator) or state.device.type == "cuda"
    }


def _setter(original: Callable[[Any], None]) -> Callable[[Any], None]:
    def set_all(states: Any) -> None:
        original(states)  # so that the original finds them once this is undone
        set_all_rng_states(states)

    return set_all


# Note [The class stays, its methods change]
# Subclasses (Megatron's) took Transformer Engine's class as their base when they were imported, `isinstance` asks for
# it, and instances exist, some for the life of the process. So the class object stays and gets this package's methods.
# Instances keep their streams in the attribute that they always had, `states_`, so one that was made before is right
# at once, and one that was made meanwhile is right afterwards.
def _plan_tracker(plan: Plan, distributed: Any, cls: type) -> None:
    ours = CudaRNGStatesTracker

    def init(self: Any) -> None:
        vars(self)["states_"] = {}
        self.seeds_ = set()
        register_tracker(self)

    def read(self: Any) -> dict[str, Generator]:
        states: dict[str, Generator] = vars(self).setdefault("states_", {})
        return states

    def write(self: Any, states: dict[str, Generator]) -> None:
        vars(self)["states_"] = states

    def get_states(self: Any) -> dict[str, Generator]:
        return carrying(ours.get_states(self))

    def set_states(self: Any, states: Any) -> None:
        ours.set_states(self, states)
        distributed._ALL_ACTIVE_RNG_STATES = read(self)

    def add(self: Any, name: str, seed: int) -> None:
        ours.add(self, name, seed)
        distributed._ALL_ACTIVE_RNG_STATES = read(self)

    def fork(self: Any, name: str = "model-parallel-rng") -> Iterator[None]:
        with ours.fork(self, name):
            yield

    blank = vars(ours())  # what instances of ours hold; theirs find it on the class
    inner = {name: value for name, value in blank.items() if name not in ("_states", "seeds_")}
    theirs = {name: value for name, value in vars(ours).items() if name not in _OF_THE_CLASS}
    replaced = {
        "__init__": init,
        "_states": property(read, write),
        "states_": property(vars(ours)["states_"].fget, write),
        "get_states": get_states,
        "set_states": set_states,
        "add": add,
    }
    for name, value in {**inner, **theirs, **replaced}.items():
        if name != "fork":
            plan.attribute(cls, name, value)
    # Bound methods that were kept before now (an attention module keeps its tracker's fork).
    plan.code(cls, "fork", lambda original: fork)
    plan.attribute(cls, "fork", ours.fork)
    for instance in instances_of(cls):
        register_tracker(instance)
    plan.on_undo(lambda: unregister_trackers(cls))
    sub: type
    for sub in cls.__subclasses__():
        own = [name for name in ("fork", "get_states", "add", "reset", "set_states") if name in vars(sub)]
        if "fork" in own or "get_states" in own:
            plan.notes.append(
                f"{sub.__module__}.{sub.__qualname__} overrides {', '.join(own)} of the tracker: its streams are "
                "covered whole where it is passed to a region, and not at all where it is not"
            )


def instances_of(cls: type) -> list[Any]:
    """Return all live instances of a class and of its subclasses."""
    return [found for found in gc.get_objects() if issubclass(type(found), cls)]
