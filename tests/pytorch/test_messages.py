# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Every exception class and every warning, raised for real: its text says what, where, and what to do next."""

from __future__ import annotations

import ast
import functools
import json
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

import _messages_more  # noqa: F401 - adds its rows
from _helpers import run_distributed
from _messages import CASES, Around, Case
from _source import PACKAGE, source_files
from transformer_engine_ext import errors
from transformer_engine_ext.pytorch.rng import native_find

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

#: The files that the rows lie in.
HERE = {row.provoke.__code__.co_filename for row in CASES}

#: The base is never raised itself.
ABSTRACT = {errors.TEExtError}


@pytest.fixture
def around(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Around]:
    native_find.settings.cache_clear()
    yield Around(tmp_path, monkeypatch)
    native_find.settings.cache_clear()


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
        assert row.site in ("audit_seeds", "warm_up", "prepare") or warning.filename in HERE, warning.filename
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
