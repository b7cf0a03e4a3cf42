# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Every exception class and every warning, raised for real: its text says what, where, and what to do next."""

from __future__ import annotations

import ast
import contextlib
import functools
import json
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import transformer_engine_ext
from _capture import FakeKit
from _helpers import run_distributed
from _native import FakeCompiler, torch_build
from _regions import new_tracker
from _source import PACKAGE, source_files
from transformer_engine_ext import errors
from transformer_engine_ext.pytorch import CudaRNGStatesTracker, te_checkpoint
from transformer_engine_ext.pytorch.distributed import ParallelRNG, StreamSpec, megatron_streams
from transformer_engine_ext.pytorch.distributed.collisions import audit_seeds
from transformer_engine_ext.pytorch.distributed.derivations import derive_table
from transformer_engine_ext.pytorch.distributed.topology import Layout
from transformer_engine_ext.pytorch.recompute import debug
from transformer_engine_ext.pytorch.rng import native
from transformer_engine_ext.pytorch.rng.devices import get_backend
from transformer_engine_ext.pytorch.rng.native_build import TorchBuild


@dataclass
class Around:
    """What a case may use."""

    folder: Path
    monkeypatch: pytest.MonkeyPatch


@dataclass
class Case:
    """What provokes a message, of which class, and what its text must say.

    A case is the table's row; ``site`` is the function that warns, for warnings.
    """

    name: str
    kind: type[BaseException]
    provoke: Callable[[Around], object]
    what: str
    where: str
    action: str
    site: str = ""


CASES: list[Case] = []


def case(
    kind: type[BaseException], what: str, where: str, action: str, site: str = ""
) -> Callable[[Callable[[Around], object]], Callable[[Around], object]]:
    """Add a row."""

    def add(provoke: Callable[[Around], object]) -> Callable[[Around], object]:
        CASES.append(Case(provoke.__name__, kind, provoke, what, where, action, site))
        return provoke

    return add


def ones(count: int = 8) -> torch.Tensor:
    return torch.ones(count, requires_grad=True)


def second_run_differs(extra: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], torch.Tensor]:
    runs: list[int] = []

    def block(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        if len(runs) > 1:
            extra(x)
        return x.exp()

    return block


# ---------------------------------------------------------------- streams of one process


@case(errors.StreamExistsError, "cuda rng state noise already exists", "Streams: 'noise'", "Choose another name")
def name_twice(around: Around) -> None:
    new_tracker("noise").add("noise", 7)


@case(errors.StreamExistsError, "seed 100 already exists", "stream 'other' would draw the same", "Choose another seed")
def seed_twice(around: Around) -> None:
    new_tracker("noise").add("other", 100)


@case(
    errors.UnknownStreamError, "cuda rng state b is not added", "Streams of this tracker: 'a'", "tracker.add('b', seed)"
)
def unknown_stream(around: Around) -> None:
    with new_tracker("a").fork("b"):
        pass


@case(errors.StreamStateTypeError, "a int", "stream 'a'", "expected a torch.Generator or a uint8")
def state_of_no_type(around: Around) -> None:
    new_tracker("a").set_states({"a": 3})


@case(errors.StateFormatError, "bytes", "stream 'a'", "Nothing was changed")
def state_of_no_length(around: Around) -> None:
    new_tracker("a").set_states({"a": torch.zeros(5, dtype=torch.uint8)})


@case(
    errors.UnsupportedDeviceError,
    "device type 'meta' cannot be tracked",
    "backends for cpu, cuda",
    "Keep the stream on",
)
def device_without_streams(around: Around) -> None:
    get_backend("meta")


# ---------------------------------------------------------------- regions


@case(
    errors.RecomputeMismatchError,
    "drew other random numbers than its forward",
    "stream 'default (cpu)': forward drew 0 32-bit words, recompute drew 3 32-bit words",
    "add it with CudaRNGStatesTracker.add",
)
def recompute_draws_more(around: Around) -> None:
    te_checkpoint(second_run_differs(lambda x: torch.rand(3)), ones()).sum().backward()


@case(
    errors.SavedTensorMismatchError,
    "A different number of tensors was saved",
    "during forward: 1\n.*during recomputation: 3",
    "pass debug=True",
)
def recompute_saves_more(around: Around) -> None:
    te_checkpoint(second_run_differs(lambda x: x.cos().cos()), ones(), use_reentrant=False).sum().backward()


@case(errors.ReentrantGradError, "not compatible with .grad()", "a reentrant region", "use_reentrant=False")
def reentrant_and_grad(around: Around) -> None:
    x = ones()
    torch.autograd.grad(te_checkpoint(torch.exp, x).sum(), x)


@case(errors.NotDifferentiableError, "none of output has requires_grad=True", "region's outputs", "check for detach()")
def nothing_to_differentiate(around: Around) -> None:
    te_checkpoint(lambda x: x.detach(), ones()).sum().backward()


@case(errors.CheckpointArgumentError, "determinism_check", "got 'maybe'", "one of 'default', 'none'")
def argument_of_no_value(around: Around) -> None:
    te_checkpoint(torch.exp, ones(), determinism_check="maybe")


@case(errors.CheckpointArgumentError, "debug=True", "context_fn", "pass only one of them")
def arguments_that_exclude_each_other(around: Around) -> None:
    contexts = (contextlib.nullcontext(), contextlib.nullcontext())
    te_checkpoint(torch.exp, ones(), use_reentrant=False, debug=True, context_fn=lambda: contexts)


@case(errors.SuppressedErrorError, "suppressed an exception", "the forward context that context_fn", "re-raise it")
def swallowing_context(around: Around) -> None:
    def fails(x: torch.Tensor) -> torch.Tensor:
        raise ValueError

    contexts = (contextlib.suppress(ValueError), contextlib.nullcontext())
    te_checkpoint(fails, ones(), use_reentrant=False, context_fn=lambda: contexts)


@case(
    errors.DistributedNotInitializedError,
    "needs torch.distributed",
    "distribute_saved_activations=True",
    "call torch.distributed.init_process_group",
)
def no_process_group(around: Around) -> None:
    te_checkpoint(torch.exp, ones(), distribute_saved_activations=True)


# ---------------------------------------------------------------- the debug mode


@case(
    errors.UntrackedGeneratorError,
    "drew from a generator of its own",
    r"\(aten.rand.generator with generator=, seed 5, device cpu\)",
    "tracker.add(name, seed)",
)
def untracked_generator(around: Around) -> None:
    around.monkeypatch.setattr(debug, "ENABLED", True)
    private = torch.Generator().manual_seed(5)
    te_checkpoint(lambda x: x * torch.rand(8, generator=private), ones())


@case(
    errors.ConcurrentDrawError,
    "drew from a default generator",
    r"region of thread \d+ while a region of thread \d+ was open",
    "Run the regions one after the other",
)
def draws_of_two_threads(around: Around) -> None:
    around.monkeypatch.setattr(debug, "ENABLED", True)
    opened, ended = threading.Event(), threading.Event()

    def waits(x: torch.Tensor) -> torch.Tensor:
        opened.set()
        ended.wait(30)
        return x.exp()

    thread = threading.Thread(target=lambda: te_checkpoint(waits, ones()))

    def draws(x: torch.Tensor) -> torch.Tensor:
        thread.start()
        opened.wait(30)
        return torch.nn.functional.dropout(x)

    try:
        te_checkpoint(draws, ones())
    finally:
        ended.set()
        thread.join()


# ---------------------------------------------------------------- CUDA graphs and the native library


def fake_torch_211(around: Around) -> None:
    """Make this process look like one with torch 2.11 and CUDA, whose native library was not built."""
    around.monkeypatch.setattr(TorchBuild, "running", classmethod(lambda cls: torch_build(around.folder)))
    around.monkeypatch.setattr(native, "PACKAGE_FOLDER", around.folder)
    around.monkeypatch.setattr(native, "_reader", None)
    around.monkeypatch.setattr(native, "_warm", False)
    around.monkeypatch.setattr(native, "_capturing", lambda: False)
    around.monkeypatch.setenv("NVTE_EXT_CACHE_DIR", str(around.folder / "cache"))


@case(
    errors.UnsupportedCaptureError,
    "backward of a checkpointed region is being captured",
    "its forward ran outside of any graph",
    "Capture the forward too",
)
def captured_backward_of_an_eager_forward(around: Around) -> None:
    kit = FakeKit(registers=True)
    kit.machine.install(around.monkeypatch)
    x = kit.ones(8).requires_grad_()
    y = te_checkpoint(kit.drop, x)
    with kit.capturing(kit.graph()):
        y.backward(torch.ones_like(y))


@case(errors.UnsupportedCaptureError, "is not registered with the graph", "stream 'a'", r"register_streams\(graph\)")
def unregistered_stream(around: Around) -> None:
    kit = FakeKit(registers=True)
    kit.machine.install(around.monkeypatch)
    tracker = CudaRNGStatesTracker("cuda")
    tracker.add("a", 1)

    def region(x: torch.Tensor) -> torch.Tensor:
        with tracker.fork("a"):
            return kit.drop(x)

    with kit.capturing(kit.graph(register=False)):
        te_checkpoint(region, kit.ones(8).requires_grad_())


@case(errors.NativeUnavailableError, "there is no philox_state.so", r"torch 2.11.0\+cu130", "install torch >= 2.14")
def no_native_library(around: Around) -> None:
    fake_torch_211(around)
    native.prepare()


@case(errors.SettingError, "'yes' is unknown", "NVTE_EXT_NATIVE", "expected one of auto, 0, 1")
def setting_of_no_value(around: Around) -> None:
    around.monkeypatch.setenv("NVTE_EXT_NATIVE", "yes")
    native.prepare()


@case(
    RuntimeWarning,
    "no such header",
    r"torch 2.11.0\+cu130",
    "Training without capture is not affected",
    site="warm_up",
)
def native_library_cannot_be_built(around: Around) -> None:
    fake_torch_211(around)
    around.monkeypatch.setenv("NVTE_EXT_JIT", "1")
    FakeCompiler(around.folder).use(around.monkeypatch, fail="no such header")
    native.warm_up()


# ---------------------------------------------------------------- the whole job


def job(*names: str) -> ParallelRNG:
    streams = [StreamSpec("default", (), seed_offset=0, is_default=True)]
    return ParallelRNG(None, streams + [StreamSpec(name, (), seed_offset=7) for name in names], device="cpu")


@case(
    errors.SeedCollisionError,
    "would draw the same numbers",
    "'one' .* and 'two' .* the only rank",
    "another seed_offset",
)
def two_streams_on_one_seed(around: Around) -> None:
    job("one", "two").seed(1)


@case(
    errors.SeedCollisionWarning,
    "start from one seed",
    "expert-parallel-rng at pp 1",
    "derivation='fold_in' never meet",
    site="audit_seeds",
)
def two_ranks_on_one_seed(around: Around) -> None:
    layout = Layout.of_product({"pp": 2, "ep": 2}, 0)
    audit_seeds(
        derive_table("megatron", megatron_streams(), 0, layout.axes, bits=64), layout, bits=64, derivation="megatron"
    )


def saved(around: Around) -> Path:
    path = around.folder / "streams.safetensors"
    rng = job("a")
    rng.seed(1)
    rng.save(path)
    return path


@case(
    errors.LayoutMismatchError,
    "holds other streams",
    "Saved ['default', 'a'], running ['default', 'b']",
    "on_stream_change='rederive'",
)
def file_of_other_streams(around: Around) -> None:
    job("b").load(saved(around))


@case(errors.StateFormatError, "a truncated one", "streams.safetensors", "Use an earlier save")
def truncated_file(around: Around) -> None:
    path = saved(around)
    path.write_bytes(path.read_bytes()[:-9])
    job("a").load(path)


@case(errors.PatchError, "could not replace everything", "transformer_engine: not installed", "unpatch()")
def strict_patch(around: Around) -> None:
    around.monkeypatch.setitem(sys.modules, "transformer_engine", None)
    try:
        transformer_engine_ext.patch(strict=True)
    finally:
        transformer_engine_ext.unpatch()


@case(UserWarning, "was not tested", "transformer-engine 9.9", "Run te-ext doctor", site="patch")
def unknown_version(around: Around) -> None:
    from transformer_engine_ext.integrations import patching

    around.monkeypatch.setitem(sys.modules, "transformer_engine", None)
    version = {"transformer-engine": "9.9"}.get
    around.monkeypatch.setattr(patching, "installed_version", version)
    try:
        transformer_engine_ext.patch()
    finally:
        transformer_engine_ext.unpatch()


# ---------------------------------------------------------------- arguments of older releases


@case(DeprecationWarning, "deprecated", "tp_group to te_checkpoint", "as keyword arg", site="take_positional_options")
def positional_options(around: Around) -> None:
    te_checkpoint(torch.exp, False, lambda: new_tracker("a"), None, ones())


@case(
    DeprecationWarning, "get_cuda_rng_tracker", "te_checkpoint", "pass get_rng_state_tracker", site="take_old_keyword"
)
def old_keyword(around: Around) -> None:
    te_checkpoint(torch.exp, ones(), get_cuda_rng_tracker=lambda: new_tracker("a"))


@case(UserWarning, "has no effect", "distribute_saved_activations=True", "use the reentrant engine", site="_checkpoint")
def distribute_on_the_other_engine(around: Around) -> None:
    te_checkpoint(torch.exp, ones(), distribute_saved_activations=True, use_reentrant=False)


# ---------------------------------------------------------------- the tests

#: Cases that take two ranks: row of the launch, class, what, where, action.
RANKS = {
    "mismatch": (
        errors.StreamMismatchError,
        "do not agree as declared",
        r"default: ranks 0 \(tp 0\), 1 \(tp 1\) stand at",
        r"Find that place; verify\(repair='broadcast'\)",
    ),
    "dead": (errors.PeerFailureError, "could not finish the exchange", "Rank 1 died or did not answer", "log"),
}

#: The base is never raised itself.
ABSTRACT = {errors.TEExtError}


@pytest.fixture
def around(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Around]:
    native._settings.cache_clear()
    yield Around(tmp_path, monkeypatch)
    native._settings.cache_clear()


def assert_says(text: str, what: str, where: str, action: str) -> None:
    for pattern in (what, where, action):
        assert pattern in text or re.search(pattern, text, re.DOTALL), f"{pattern!r} is not in:\n{text}"
    assert "\\n" not in text, "lines are lines"
    assert "<function" not in text, "no addresses of objects"


@pytest.mark.parametrize("row", CASES, ids=lambda row: row.name)
def test_message(row: Case, around: Around) -> None:
    if issubclass(row.kind, Warning):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            row.provoke(around)
        (warning,) = caught
        assert warning.category is row.kind
        text = str(warning.message)
        # The line to change is the caller's, not one of this package.
        assert row.site in ("audit_seeds", "warm_up") or warning.filename == __file__, warning.filename
    else:
        with pytest.raises(row.kind) as raised:
            row.provoke(around)
        assert type(raised.value) is row.kind
        text = str(raised.value)
    assert_says(text, row.what, row.where, row.action)


@pytest.fixture(scope="module")
def texts_of_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    folder = tmp_path_factory.mktemp("messages")
    run_distributed("run_messages.py", 2, folder)
    return [json.loads((folder / f"texts-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("name", RANKS)
def test_message_between_ranks(name: str, texts_of_ranks: list[dict[str, str]]) -> None:
    _, *parts = RANKS[name]
    assert_says(texts_of_ranks[0][name], *parts)
    if name == "mismatch":
        assert texts_of_ranks[0][name] == texts_of_ranks[1][name], "the same on every rank"


def test_warnings_and_logs_between_ranks(texts_of_ranks: list[dict[str, str]]) -> None:
    """One rank speaks for all, once."""
    first, second = texts_of_ranks
    assert first["drifted"].count("UserWarning: ") == 1
    assert_says(
        first["drifted"], "stood at different positions", "drifted.safetensors: default", r"verify\(\) before saving"
    )
    assert first["repaired"].count("WARNING transformer_engine_ext: verify(repair='broadcast')") == 1
    assert second["drifted"] == second["repaired"] == ""


def test_every_error_class_has_a_row() -> None:
    known = {getattr(errors, name) for name in errors.__all__} - ABSTRACT
    rows = {row.kind for row in CASES} | {row[0] for row in RANKS.values()}
    assert known - rows == set()


@functools.cache
def calls(file: Path) -> list[tuple[str, str, str]]:
    """Return each call in a file: what is called, the innermost function around it, and its text."""
    found = []

    def search(node: ast.AST, inside: str) -> None:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            inside = node.name
        if isinstance(node, ast.Call) and isinstance(node.func, (ast.Name, ast.Attribute)):
            found.append((ast.unparse(node.func), inside, ast.unparse(node)))
        for child in ast.iter_child_nodes(node):
            search(child, inside)

    search(ast.parse(file.read_text()), "")
    return found


LIBRARY = [file for file in source_files() if file.suffix == ".py" and PACKAGE in file.parents]


def test_every_warning_has_a_row() -> None:
    sites = {site for file in LIBRARY for name, site, _ in calls(file) if name == "warnings.warn"}
    assert sites == {row.site for row in CASES if row.site} | {"load_streams"}, "that one: between ranks, above"


PRINTING = {"print", "sys.stdout.write", "sys.stderr.write", "os.write", "traceback.print_exc", "pprint"}


def test_nothing_is_printed_by_the_library() -> None:
    found = [
        f"{file.relative_to(PACKAGE)}: {text}"
        for file in LIBRARY
        if "cli" not in file.relative_to(PACKAGE).parts
        for name, _, text in calls(file)
        if name in PRINTING
    ]
    assert found == []


def test_a_print_is_found(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text("def f():\n    if True:\n        print('here')\n")
    assert calls(tmp_path / "module.py") == [("print", "f", "print('here')")]


def test_loggers_have_the_packages_name_and_no_handler() -> None:
    """Whoever runs the job decides where lines go and which: a library that configures logging takes that away."""
    logging_calls = [(name, text) for file in LIBRARY for name, _, text in calls(file) if name.startswith("logging.")]
    assert logging_calls
    assert {name for name, _ in logging_calls} == {"logging.getLogger"}
    assert {text for _, text in logging_calls} <= {
        "logging.getLogger('transformer_engine_ext')",
        "logging.getLogger(__name__)",
    }
