# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""F5: a Transformer Engine that is installed but does not work must not take this package down with it."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from _helpers import REPO, TESTS

# What a broken installation does when it is imported, by the kind of fault.
_FAULTS = {
    "missing native part": "raise ImportError('libtransformer_engine.so: cannot open shared object file')",
    "wrong NCCL": "raise OSError('/usr/lib/libnccl.so.2: undefined symbol: ncclCommWindowRegister')",
    "version mismatch": "raise AssertionError('Found inconsistent versions of transformer_engine and its parts')",
    "no CUDA": "raise RuntimeError('CUDA driver version is insufficient for CUDA runtime version')",
    "half removed": "raise FileNotFoundError('Could not find shared object file for Transformer Engine core lib.')",
    "other Python": "raise SyntaxError('invalid syntax')",
    "exits": "raise SystemExit(3)",
    "missing dependency": "import a_module_that_nobody_has",
    "no such attribute": "import torch; torch.no_such_attribute",
}

# One process imports torch, which takes seconds, and forks once per scenario, so that each starts without our package.
_FORKS = """
import json, os, sys, traceback, warnings
import torch
import torch._dynamo  # torch imports it at the first checkpoint or compile; here once instead of in every child

for name, scenario in json.load(open(sys.argv[1])).items():
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        try:
            sys.path.insert(0, scenario["folder"])
            warnings.simplefilter("error")
            exec(scenario["before"], {})
            exec(open(sys.argv[2]).read(), {"between": scenario["between"]})
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        os._exit(0)
    print(f"{name}: {os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}")
"""

_USE = """
import torch
import transformer_engine_ext
import transformer_engine_ext.pytorch
import transformer_engine_ext.pytorch.distributed
from transformer_engine_ext import te_checkpoint, CudaRNGStatesTracker
exec(between, {})
from _proof import Proof, assert_one_mask

for use_reentrant in (True, False):
    tracker, proof = CudaRNGStatesTracker("cpu"), Proof()
    tracker.add("a", 1)

    def region(x):
        proof.ran()
        with tracker.fork("a"):
            mask = torch.nn.functional.dropout(torch.ones_like(x), 0.5)
        return proof.watch(mask) * x

    x = torch.ones(256, requires_grad=True)
    y = te_checkpoint(region, x, use_reentrant=use_reentrant, get_rng_state_tracker=lambda: tracker)
    proof.after_forward()
    y.sum().backward()
    proof.after_backward()
    assert_one_mask(y, x.grad)
"""

# The user tries, sees the fault, and goes on without: ``transformer_engine`` stays in sys.modules, its parts do not.
_ATTEMPT = """
import transformer_engine
try:
    import transformer_engine.pytorch
except (Exception, SystemExit):
    pass
else:
    raise AssertionError("the fault did not show")
"""
_SUCCEEDS = "import transformer_engine.pytorch"
_NOT_IMPORTED = "import sys; assert 'transformer_engine' not in sys.modules"


@dataclasses.dataclass
class _Scenario:
    """An installation, and what the user does before and after importing this package."""

    init: str | None = None
    pytorch: str | None = None
    distributed: str | None = None
    before: str = ""
    between: str = ""

    def install(self, folder: Path) -> dict[str, str]:
        """Write the package ``transformer_engine`` into `folder`."""
        parts = {"": self.init, "pytorch": self.pytorch, "pytorch/distributed": self.distributed}
        for path, text in parts.items():
            if text is not None:
                module = folder / "transformer_engine" / path
                module.mkdir(parents=True)
                (module / "__init__.py").write_text(text + "\n")
        return {"folder": str(folder), "before": self.before, "between": self.between}


_IMPORTS = "__version__ = '2.20.2'"
_SCENARIOS = {
    # Installed, broken, never imported by the user: nobody notices, and nothing of it is imported.
    **{f"never imported, {name}": _Scenario(fault, between=_NOT_IMPORTED) for name, fault in _FAULTS.items()},
    **{f"tried before, {name}": _Scenario(_IMPORTS, fault, before=_ATTEMPT) for name, fault in _FAULTS.items()},
    "tried between": _Scenario(_IMPORTS, _FAULTS["missing native part"], between=_ATTEMPT),
    # Another version than any we know: it imports, but its distributed module has none of the flags.
    "unknown names": _Scenario(
        _IMPORTS, "from . import distributed", "VALUE = 1", before="import transformer_engine.pytorch"
    ),
    "no distributed module": _Scenario(_IMPORTS, "", before="import transformer_engine.pytorch"),
    # Python's way of forbidding an import; projects use it to switch Transformer Engine off.
    "package forbidden": _Scenario(before="import sys; sys.modules['transformer_engine'] = None"),
    "part forbidden": _Scenario(before="import sys; sys.modules['transformer_engine.pytorch'] = None"),
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], str]:
    """Run all scenarios; return a line ``name: exit code`` for each, and everything they wrote to stderr."""
    base = tmp_path_factory.mktemp("broken")
    scenarios = {}
    for index, (name, scenario) in enumerate(_SCENARIOS.items()):
        scenarios[name] = scenario.install(base / str(index))
    (base / "scenarios.json").write_text(json.dumps(scenarios))
    (base / "use.py").write_text(_USE)
    result = subprocess.run(
        [sys.executable, "-c", _FORKS, str(base / "scenarios.json"), str(base / "use.py")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(REPO), str(TESTS)]), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=170,
    )
    return result.stdout.splitlines(), result.stderr


@pytest.mark.parametrize("name", _SCENARIOS)
def test_f5_broken_transformer_engine(name: str, outcomes: tuple[list[str], str]) -> None:
    lines, errors = outcomes
    assert f"{name}: 0" in lines, errors
