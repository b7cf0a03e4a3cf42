# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""What is replaced in Megatron-core, module by module, and the region hook for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformer_engine_ext.integrations.contexts import inside_region
from transformer_engine_ext.integrations.local_graphs import prefers_non_reentrant, warming_up
from transformer_engine_ext.integrations.megatron_guards import plan_guards
from transformer_engine_ext.integrations.megatron_states import plan_states, plan_tracker
from transformer_engine_ext.integrations.plan import Plan
from transformer_engine_ext.pytorch import te_checkpoint
from transformer_engine_ext.pytorch.recompute import register_region_hook, unregister_region_hook

__all__ = ["MODULES", "plan_megatron"]

_RANDOM = "megatron.core.tensor_parallel.random"
_CONFIG = "megatron.core.transformer.transformer_config"

#: Modules that are patched when they are imported.
MODULES = (_RANDOM, _CONFIG)


def plan_megatron(module: Any) -> Plan:
    """Plan the replacements in one of ``MODULES``.

    Parameters
    ----------
    module : module
        The imported module.

    Returns
    -------
    Plan
        Not applied yet.
    """
    plan = Plan()
    if module.__name__ == _CONFIG:
        plan_guards(plan, module)
        return plan
    plan.code(module, "checkpoint", lambda original: _checkpoint(module))
    plan_states(plan, module)  # See Note [Megatron's helpers hold a snapshot]
    plan_tracker(plan, module)
    _plan_without_output(plan, module)
    hook = MegatronHook(module)
    register_region_hook(hook)
    plan.on_undo(lambda: unregister_region_hook(hook))
    return plan


def _checkpoint(module: Any) -> Callable[..., Any]:
    def checkpoint(function: Callable[..., Any], distribute_saved_activations: bool, *args: Any) -> Any:
        # See Note [Local graphs take the non-reentrant engine]
        local = prefers_non_reentrant()
        group = None
        if distribute_saved_activations and not local:
            from megatron.core import parallel_state

            group = parallel_state.get_tensor_model_parallel_group()
        return te_checkpoint(
            function,
            *args,
            use_reentrant=not local,
            distribute_saved_activations=distribute_saved_activations and not local,
            get_rng_state_tracker=module.get_cuda_rng_tracker,
            tp_group=group,
        )

    return checkpoint


def _plan_without_output(plan: Plan, module: Any) -> None:
    cls = getattr(module, "CheckpointWithoutOutput", None)
    if not isinstance(cls, type):
        plan.skip(f"{module.__name__}.CheckpointWithoutOutput", "this version has no such class")
        return

    # See Note [Contexts that belong together share a memory]
    def forward(original: Callable[..., Any]) -> Callable[..., Any]:
        def checkpoint(self: Any, run_function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if warming_up():
                return original(self, run_function, *args, **kwargs)
            self._te_ext_memory = {}
            with inside_region(self._te_ext_memory, recompute=False):
                return original(self, run_function, *args, **kwargs)

        return checkpoint

    def recompute(original: Callable[..., Any]) -> Callable[..., Any]:
        def _recompute(self: Any, *args: Any, **kwargs: Any) -> Any:
            memory = vars(self).get("_te_ext_memory")
            if memory is None or self.ctx is None or warming_up():
                return original(self, *args, **kwargs)
            with inside_region(memory, recompute=True):
                return original(self, *args, **kwargs)

        return _recompute

    plan.code(cls, "checkpoint", forward)
    plan.code(cls, "_recompute", recompute)


class MegatronHook:
    """Megatron's flag "inside a checkpoint", put back instead of reset, and the name its own tracker is forked to.

    Parameters
    ----------
    module : module
        ``megatron.core.tensor_parallel.random``.

    Notes
    -----
    Megatron's byte-state tracker keeps the name of the stream that is bound. A region called inside a fork and
    recomputed outside of it must find that name again, or a fork of the same stream inside starts from a stale state.
    """

    def __init__(self, module: Any) -> None:
        self._module = module

    def _enter(self, name: str | None) -> tuple[Any, ...]:
        module = self._module
        tracker = getattr(module, "_CUDA_RNG_STATE_TRACKER", None)
        token = getattr(module, "IS_CHECKPOINTING", None), tracker, getattr(tracker, "_current_state_name", None)
        if token[0] is not None:
            module.IS_CHECKPOINTING = True
        if name is not None and token[2] is not None:
            tracker._current_state_name = name  # type: ignore[union-attr]
        return token

    def _leave(self, token: tuple[Any, ...]) -> None:
        flag, tracker, name = token
        if flag is not None:
            self._module.IS_CHECKPOINTING = flag
        if name is not None:
            tracker._current_state_name = name

    def enter_forward(self, memory: dict[str, Any], reentrant: bool) -> Any:
        """Set the flag, note the name."""
        token = self._enter(None)
        memory["name"] = token[2]
        return token

    def leave_forward(self, memory: dict[str, Any], token: Any) -> None:
        """Put the flag back."""
        self._leave(token)

    def enter_recompute(self, memory: dict[str, Any], reentrant: bool) -> Any:
        """Set the flag and the forward's name."""
        return self._enter(memory["name"])

    def leave_recompute(self, memory: dict[str, Any], token: Any) -> None:
        """Put both back."""
        self._leave(token)
