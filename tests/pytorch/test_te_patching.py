# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""patch() on the real Transformer Engine and Megatron-core; what needs no GPU runs wherever they can be imported."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from _helpers import REPO, TESTS, requires_cuda

_MISSING = [name for name in ("transformer_engine", "megatron") if importlib.util.find_spec(name) is None]
with_both = pytest.mark.skipif(bool(_MISSING), reason=f"{' and '.join(_MISSING)} not installed")
with_megatron = pytest.mark.skipif("megatron" in _MISSING, reason="megatron is not installed")

# Each scenario runs in a process of its own: what was imported first is what is tested.
_PRELUDE = """
import json, sys, types, warnings
warnings.simplefilter("ignore")
import torch
import torch.nn.functional as F
import transformer_engine_ext as ext

def trace(module):
    found = {}
    def note(path, value):
        value = getattr(value, "__func__", value)
        found[path] = id(value)
        inner = getattr(value, "__wrapped__", value)
        if isinstance(inner, types.FunctionType):
            found[path + " code"] = id(inner.__code__)
            found[path + " more"] = sorted(vars(inner))
    for name, value in vars(module).items():
        note(name, value)
        if isinstance(value, type) and value.__module__ == module.__name__:
            for attribute, held in vars(value).items():
                note(name + "." + attribute, held)
    return found

def wrong(checkpoint, tracker, device):
    def region(x):
        x = F.dropout(x, 0.5)
        with tracker.fork():
            return F.dropout(x, 0.25)
    x = torch.ones(512, device=device, requires_grad=True)
    y = checkpoint(region, x)
    torch.rand(3, device=device)
    y.backward(torch.ones_like(y))
    return int((y.detach() != x.grad).sum())
"""


def run(code: str) -> object:
    """Run code in a fresh interpreter; return what it printed last, as JSON."""
    path = os.pathsep.join([str(REPO), str(TESTS), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", _PRELUDE + code],
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@with_both
def test_f4_unpatch_leaves_no_trace_and_reaches_every_place() -> None:
    found = run(
        """
import transformer_engine.pytorch, megatron.core.tensor_parallel.random, megatron.core.transformer.cuda_graphs
import megatron.core.extensions.transformer_engine, megatron.core.transformer.transformer_config
mine = [m for n, m in list(sys.modules.items()) if n.partition(".")[0] in ("transformer_engine", "megatron")]
before = [trace(m) for m in mine]
report = ext.patch(strict=True)
changed_while = sum(trace(m) != b for m, b in zip(mine, before))
again = ext.patch(strict=True) == report
trouble = ext.unpatch()
changed = [m.__name__ for m, b in zip(mine, before) if trace(m) != b]
print(json.dumps([changed, changed_while, again, trouble, [list(r.copies) for r in report.replaced]]))
"""
    )
    assert isinstance(found, list)
    changed, changed_while, again, trouble, copies = found
    assert (changed, again, trouble) == ([], True, [])
    assert changed_while >= 3, "distributed, Megatron's random, its configuration, and whoever holds copies"
    reached = {name for names in copies for name in names}
    assert {
        "transformer_engine.pytorch.checkpoint",
        "transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention.checkpoint",
        "transformer_engine.pytorch.attention.linear_attention.base.checkpoint",
        "transformer_engine.pytorch.graph.get_all_rng_states",
        "megatron.core.tensor_parallel.checkpoint",
    } <= reached


_TE, _MEGATRON = "import transformer_engine.pytorch as te;", "import megatron.core.tensor_parallel.random as r;"
_PATCH = "ext.patch();"
ORDERS = {
    "patch first": _PATCH + _TE + _MEGATRON,
    "between": _TE + _PATCH + _MEGATRON,
    "last": _TE + _MEGATRON + _PATCH,
    "Megatron first": _MEGATRON + _TE + _PATCH,
}


@with_both
@pytest.mark.parametrize("order", ORDERS)
def test_f4_any_order_of_imports(order: str) -> None:
    """On the CPU, where trackers of this package make CPU streams; unpatched, theirs cannot even be filled there."""
    found = run(
        ORDERS[order]
        + """
from megatron.core.extensions.transformer_engine import TECudaRNGStatesTracker
torch.cuda.is_available = lambda: False
results = []
for make in (te.CudaRNGStatesTracker, TECudaRNGStatesTracker):
    tracker = make()
    tracker.add("model-parallel-rng", 3)
    for reentrant in (True, False):
        results.append(wrong(lambda f, x: te.checkpoint(f, x, use_reentrant=reentrant), tracker, "cpu"))
        results.append(wrong(lambda f, x: te.checkpoint(
            f, x, use_reentrant=reentrant, get_rng_state_tracker=lambda: tracker), tracker, "cpu"))
r.initialize_rng_tracker(use_te_rng_tracker=True, force_reset=True)
r.get_cuda_rng_tracker().add("model-parallel-rng", 5)
results.append(wrong(lambda f, x: r.checkpoint(f, False, x), r.get_cuda_rng_tracker(), "cpu"))
print(json.dumps([results, isinstance(tracker, te.CudaRNGStatesTracker)]))
"""
    )
    assert found == [[0] * 9, True]


@requires_cuda
@with_both
def test_a_script_that_knows_nothing_is_made_exact() -> None:
    code = """
import transformer_engine.pytorch as te
from transformer_engine.pytorch import checkpoint
import functools
tracker = te.CudaRNGStatesTracker()
tracker.add("model-parallel-rng", 3)
fork = tracker.fork
kept = functools.partial(checkpoint, get_rng_state_tracker=lambda: tracker)
class Kept:
    fork = staticmethod(fork)
def count():
    return [wrong(kept, which, "cuda") > 0 for which in (tracker, Kept)]
seen = [count()]
ext.patch()
seen.append(count())
ext.unpatch()
seen.append(count())
print(json.dumps(seen))
"""
    assert run(code) == [[True, True], [False, False], [True, True]]


@with_megatron
def test_megatron_without_transformer_engine() -> None:
    """Its own checkpoint, on the CPU, where unpatched it cannot even run: it asks CUDA for its states."""
    code = """
sys.modules["transformer_engine"] = None
report = ext.patch()
import megatron.core.tensor_parallel.random as r
x = torch.ones(512, requires_grad=True)
y = r.checkpoint(lambda z: F.dropout(z, 0.5), False, x)
torch.rand(3)
y.sum().backward()
print(json.dumps([int((y.detach() != x.grad).sum()), r.HAVE_TE, r.IS_CHECKPOINTING, report.skipped[0].target,
                  any("random.checkpoint" in done.target for done in ext.patch().replaced), ext.unpatch()]))
"""
    assert run(code) == [0, False, False, "transformer_engine", True, []]
