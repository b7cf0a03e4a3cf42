# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Small packages with the names, and the ways of binding them, of Transformer Engine and Megatron-core.

Their checkpoint is wrong on purpose, as theirs is: it saves live handles. Only what patching touches is there. The real
ones are tested by test_te_*.py and test_mcore_*.py, where they are installed.
"""

from __future__ import annotations

from pathlib import Path

DISTRIBUTED = '''
from contextlib import AbstractContextManager, ContextDecorator, contextmanager
import torch
from .quantization import FP8GlobalStateManager

_USE_REENTRANT_ACTIVATION_RECOMPUTE = True
_IN_ACTIVATION_RECOMPUTE_REGION = False
_ACTIVATION_RECOMPUTE_PHASE = False
_ALL_ACTIVE_RNG_STATES = {}


def get_all_rng_states():
    return _ALL_ACTIVE_RNG_STATES


def set_all_rng_states(states):
    global _ALL_ACTIVE_RNG_STATES
    _ALL_ACTIVE_RNG_STATES = states


class activation_recompute_forward(AbstractContextManager, ContextDecorator):
    _is_first_fp8_module = []

    def __init__(self, activation_recompute=False, recompute_phase=False):
        super().__init__()
        self.activation_recompute = activation_recompute
        self.recompute_phase = recompute_phase

    def __enter__(self):
        global _IN_ACTIVATION_RECOMPUTE_REGION, _ACTIVATION_RECOMPUTE_PHASE
        _IN_ACTIVATION_RECOMPUTE_REGION = self.activation_recompute
        _ACTIVATION_RECOMPUTE_PHASE = self.recompute_phase

    def __exit__(self, *exception):
        global _IN_ACTIVATION_RECOMPUTE_REGION, _ACTIVATION_RECOMPUTE_PHASE
        _IN_ACTIVATION_RECOMPUTE_REGION = _ACTIVATION_RECOMPUTE_PHASE = False


def is_fp8_activation_recompute_enabled():
    return _IN_ACTIVATION_RECOMPUTE_REGION and FP8GlobalStateManager.is_fp8_enabled()


def in_fp8_activation_recompute_phase():
    return _ACTIVATION_RECOMPUTE_PHASE


def use_reentrant_activation_recompute():
    return _USE_REENTRANT_ACTIVATION_RECOMPUTE


def get_activation_recompute_contexts():
    return activation_recompute_forward(True, False), activation_recompute_forward(True, True)


class _Checkpoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx, function, x):
        ctx.function = function
        ctx.save_for_backward(x)
        with torch.no_grad():
            return function(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.function(x)
        y.backward(grad)
        return None, x.grad


def _no_dynamo(function):
    import functools

    @functools.wraps(function)
    def inner(*args, **kwargs):
        return function(*args, **kwargs)

    return inner


@_no_dynamo
def checkpoint(function, *args, **kwargs):
    """Theirs."""
    return _Checkpoint.apply(function, *args)


class CudaRNGStatesTracker:
    def __init__(self):
        self.states_ = {}
        self.seeds_ = set()

    def reset(self):
        self.states_ = {}
        self.seeds_ = set()

    def get_states(self):
        return dict(self.states_)

    def set_states(self, states):
        self.states_ = states
        set_all_rng_states(self.states_)

    def add(self, name, seed):
        if seed in self.seeds_:
            raise RuntimeError(f"seed {seed} already exists")
        self.seeds_.add(seed)
        self.states_[name] = torch.Generator().manual_seed(seed)
        set_all_rng_states(self.states_)

    @contextmanager
    def fork(self, name="model-parallel-rng"):
        mine, outer = self.states_[name], torch.default_generator.get_state()
        torch.default_generator.set_state(mine.get_state())
        try:
            yield
        finally:
            mine.set_state(torch.default_generator.get_state())
            torch.default_generator.set_state(outer)
'''

QUANTIZATION = '''
from collections import deque
from dataclasses import dataclass, field


@dataclass(slots=True)
class FP8GlobalState:
    fp8_enabled: bool = False
    fp8_calibration: bool = False
    fp8_recipe: object = None
    fp8_distributed_group: object = None
    is_first_fp8_module: bool = False
    fp8_graph_capturing: bool = False
    autocast_depth: int = 0
    global_amax_buffer: dict = field(default_factory=dict)
    fp8_tensors_recompute_buffer: list = field(default_factory=list)


class FP8GlobalStateManager:
    quantization_state = FP8GlobalState()
    updates = []

    @classmethod
    def is_fp8_enabled(cls):
        return cls.quantization_state.fp8_enabled

    @classmethod
    def is_first_fp8_module(cls):
        first = cls.quantization_state.is_first_fp8_module
        cls.quantization_state.is_first_fp8_module = False
        return first

    @classmethod
    def reduce_and_update_fp8_tensors(cls, forward=True):
        for buffer in cls.quantization_state.global_amax_buffer:
            cls.updates.append((buffer, forward))


class autocast:
    FIELDS = "fp8_enabled", "fp8_recipe", "is_first_fp8_module"

    def __init__(self, enabled=True):
        self.enabled = enabled

    def __enter__(self):
        state = FP8GlobalStateManager.quantization_state
        self.before = [getattr(state, name) for name in self.FIELDS]
        state.fp8_enabled = self.enabled
        if state.autocast_depth == 0:
            state.is_first_fp8_module = True
        state.autocast_depth += 1

    def __exit__(self, *exception):
        import torch

        state = FP8GlobalStateManager.quantization_state
        for name, value in zip(self.FIELDS, self.before):
            setattr(state, name, value)
        state.autocast_depth -= 1
        if self.enabled and state.autocast_depth == 0 and torch.is_grad_enabled():
            FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=True)


class Module:
    """An FP8 module: `used` lists (scale, whether it is the first) of each of its runs."""

    def __init__(self, scale):
        self.scale, self.position, self.used = scale, None, []

    def __call__(self, x):
        from . import distributed
        from .attention import in_fp8_activation_recompute_phase as recomputing

        state, scale = FP8GlobalStateManager.quantization_state, self.scale
        if not state.fp8_enabled:
            return x.sin()
        if recomputing():
            scale = state.fp8_tensors_recompute_buffer[self.position].popleft()
        else:
            state.global_amax_buffer.setdefault("amax", [])
            if distributed.is_fp8_activation_recompute_enabled():
                if self.position is None:
                    if len(state.fp8_tensors_recompute_buffer) == 0:
                        state.fp8_tensors_recompute_buffer = [deque()]
                    else:
                        state.fp8_tensors_recompute_buffer.append(deque())
                    self.position = len(state.fp8_tensors_recompute_buffer) - 1
                state.fp8_tensors_recompute_buffer[self.position].append(scale)
        import torch

        if torch.is_grad_enabled():
            before, first = state.is_first_fp8_module, FP8GlobalStateManager.is_first_fp8_module()
            if recomputing():
                state.is_first_fp8_module = before
            self.used.append((scale, first))
        else:
            self.used.append((scale, None))
        return (x * scale).sin()
'''

FILES = {
    "transformer_engine/__init__.py": '__version__ = "2.20.2"\n',
    "transformer_engine/pytorch/__init__.py": (
        "from . import distributed, quantization\nfrom .distributed import CudaRNGStatesTracker, checkpoint\n"
        "from . import attention\nfrom .module import layernorm_mlp\n"
    ),
    "transformer_engine/pytorch/distributed.py": DISTRIBUTED,
    "transformer_engine/pytorch/quantization.py": QUANTIZATION,
    "transformer_engine/pytorch/module/__init__.py": "",
    "transformer_engine/pytorch/module/layernorm_mlp.py": (
        "from ..distributed import use_reentrant_activation_recompute\n"
    ),
    "transformer_engine/pytorch/attention.py": (
        "from .distributed import CudaRNGStatesTracker, checkpoint, get_all_rng_states as states_of_all\n"
        "from .distributed import in_fp8_activation_recompute_phase\n\n\n"
        "class Attention:\n"
        "    def __init__(self, tracker):\n"
        "        assert isinstance(tracker, CudaRNGStatesTracker)\n"
        "        self.fork = tracker.fork\n\n"
        "    def checkpointed(self, function, x):\n"
        "        return checkpoint(function, x)\n"
    ),
    "megatron/core/__init__.py": "",
    "megatron/core/tensor_parallel/__init__.py": "from .random import checkpoint, get_cuda_rng_tracker\n",
    "megatron/core/tensor_parallel/random.py": """
import contextlib
import torch
from transformer_engine.pytorch.distributed import CudaRNGStatesTracker as Base
from transformer_engine.pytorch.distributed import _Checkpoint, activation_recompute_forward

IS_CHECKPOINTING = False


class TECudaRNGStatesTracker(Base):
    def __init__(self):
        super().__init__()
        self.reset()

    def reset(self):
        super().reset()
        self._is_initialized = False

    def add(self, name, seed):
        super().add(name, seed)
        self._is_initialized = True


class CudaRNGStatesTracker:
    def __init__(self):
        self.states_ = {}

    def get_states(self):
        return dict(self.states_)

    def set_states(self, states):
        self.states_ = states


_CUDA_RNG_STATE_TRACKER = TECudaRNGStatesTracker()
_CUDA_RNG_STATE_TRACKER.add("model-parallel-rng", 7)


def get_cuda_rng_tracker():
    return _CUDA_RNG_STATE_TRACKER


def _get_all_rng_states():
    return torch.get_rng_state(), None, get_cuda_rng_tracker().get_states()


def _set_all_rng_states(cpu, cuda, states):
    torch.set_rng_state(cpu)
    get_cuda_rng_tracker().set_states(states)


@contextlib.contextmanager
def _fork_rng():
    states = _get_all_rng_states()
    try:
        yield
    finally:
        _set_all_rng_states(*states)


def checkpoint(function, distribute_saved_activations, *args):
    return _Checkpoint.apply(function, *args)


class CheckpointWithoutOutput:
    ctx = None

    def checkpoint(self, function, *args):
        self.function, self.rng_states, self.ctx = function, _get_all_rng_states(), args
        with torch.no_grad(), activation_recompute_forward(True, False):
            return function(*args)

    def _recompute(self, _):
        with _fork_rng():
            _set_all_rng_states(*self.rng_states)
            with torch.enable_grad(), activation_recompute_forward(True, True):
                self.outputs = self.function(*self.ctx)
""",
    "megatron/core/transformer/__init__.py": "",
    "megatron/core/transformer/transformer_config.py": """
import dataclasses


@dataclasses.dataclass
class TransformerConfig:
    recompute_granularity: object = None
    cuda_graph_impl: str = "none"
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0
    moe_input_jitter_eps: object = None
    batch_invariant_mode: bool = False

    def __post_init__(self):
        if self.cuda_graph_impl != "none" and self.recompute_granularity == "selective":
            if self.attention_dropout != 0.0:
                assert False, "attention dropout is not supported with graphed attention recomputation."
            if self.moe_input_jitter_eps is not None:
                assert False, "moe_input_jitter_eps is not supported with graphed moe recomputation."
        if self.batch_invariant_mode:
            assert self.attention_dropout == 0.0, "Batch invariant mode does not support attention dropout"
""",
    "megatron/core/transformer/cuda_graphs.py": (
        "STATE = {'capturing': False, 'warmup': False}\n\n\n"
        "def is_graph_capturing():\n    return STATE['capturing']\n\n\n"
        "def is_graph_warmup():\n    return STATE['warmup']\n"
    ),
}


def install(folder: Path) -> None:
    """Write the packages into a folder."""
    for name, text in FILES.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
