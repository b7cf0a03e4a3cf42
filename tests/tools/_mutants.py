# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Which lines the mutation check takes away, and the source that is left.

Four kinds of mutant, all made by editing text, so that every other line keeps its place and its comments:

``remove``    a statement becomes ``pass``: calls made for their effect, assignments to attributes, items and globals,
              and assignments to names of what was saved (a later use of the name then fails, or finds an older value)
``success``   the body of a ``finally:`` or of an ``__exit__`` runs only if nothing was raised
``context``   ``with x:`` becomes ``with nullcontext():``
``flag``      an assigned ``True`` becomes ``False`` and the reverse
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# A name assigned from one of these holds a saved state. Other assignments to names compute something: taking such a
# line away says nothing about state, and the NameError that follows says nothing about the tests.
SAVES = ("bind", "read", "copy", "clone", "get_state", "get_states", "position", "positions", "rewind", "enter")
# Calls that leave nothing behind: they check, or they talk.
HARMLESS = ("warn", "warning", "debug", "info", "warn_once")


@dataclass(frozen=True)
class Mutant:
    """One change of one file."""

    file: str  # relative to the package
    line: int
    last_line: int
    function: str
    kind: str
    text: str  # the first line of what is changed
    source: str  # the whole changed file
    original: str  # the same before

    @property
    def place(self) -> str:
        """What a log calls it: exact, but only for one state of the sources."""
        return f"{self.file}:{self.line} {self.kind} {self.function}"

    @property
    def key(self) -> str:
        """What the list of survivors calls it: stable as long as the line itself does not change."""
        return f"{self.file} | {self.function} | {self.kind} | {self.text}"


def _segment(lines: list[str], first: int, last: int, new: list[str]) -> str:
    return "\n".join([*lines[: first - 1], *new, *lines[last:]]) + "\n"


def _callee(node: ast.AST) -> str:
    if isinstance(node, ast.Await):
        node = node.value
    if not isinstance(node, ast.Call):
        return ""
    function = node.func
    return (
        function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
    )


def _writes_state(target: ast.expr, global_names: set[str]) -> bool:
    if isinstance(target, (ast.Tuple, ast.List)):
        return any(_writes_state(element, global_names) for element in target.elts)
    return isinstance(target, (ast.Attribute, ast.Subscript)) or (
        isinstance(target, ast.Name) and target.id in global_names
    )


def _saves(value: ast.expr | None) -> bool:
    calls = (_callee(node) for node in ast.walk(value)) if value is not None else ()
    return any(name.strip("_").startswith(SAVES) for name in calls if name)


class _Collector:
    def __init__(self, file: str, source: str) -> None:
        self.file, self.original, self.lines = file, source, source.splitlines()
        self.found: list[Mutant] = []

    def add(self, node: ast.AST, function: str, kind: str, first: int, last: int, new: list[str]) -> None:
        text = " ".join(self.lines[first - 1].split())
        # Editing text can go wrong where syntax is unusual: better to stop here than to count a SyntaxError as killed.
        source = _segment(self.lines, first, last, new)
        compile(source, self.file, "exec")
        self.found.append(Mutant(self.file, first, last, function, kind, text, source, self.original))

    def remove(self, node: ast.stmt, function: str) -> None:
        last = node.end_lineno or node.lineno
        blank = [""] * (last - node.lineno)
        self.add(node, function, "remove", node.lineno, last, [" " * node.col_offset + "pass", *blank])

    def flip(self, node: ast.Assign | ast.AnnAssign, function: str) -> None:
        value = node.value
        if isinstance(value, ast.Constant) and isinstance(value.value, bool) and value.lineno == value.end_lineno:
            line = self.lines[value.lineno - 1]
            new = line[: value.col_offset] + str(not value.value) + line[value.end_col_offset :]
            self.add(node, function, "flag", value.lineno, value.lineno, [new])

    def on_success(self, body: list[ast.stmt], function: str, header: int, condition: str) -> None:
        """Let `body`, which starts somewhere below line `header`, run only under `condition`."""
        first, last, indent = body[0].lineno, body[-1].end_lineno or body[-1].lineno, " " * body[0].col_offset
        inner = [f"    {line}" if line else line for line in self.lines[first - 1 : last]]
        text = f"{self.lines[header - 1].strip()} {body[0].col_offset and self.lines[first - 1].strip()}"
        source = _segment(self.lines, first, last, [f"{indent}if {condition}:", *inner])
        compile(source, self.file, "exec")
        self.found.append(Mutant(self.file, first, last, function, "success", text, source, self.original))

    def null_context(self, node: ast.With, function: str) -> None:
        for item in node.items:
            expression = item.context_expr
            if item.optional_vars is None and expression.lineno == expression.end_lineno:
                line = self.lines[expression.lineno - 1]
                null = "__import__('contextlib').nullcontext()"
                new = line[: expression.col_offset] + null + line[expression.end_col_offset :]
                name = ast.unparse(expression)
                self.add(node, f"{function} ({name})", "context", expression.lineno, expression.lineno, [new])

    def statement(self, node: ast.stmt, function: str, global_names: set[str]) -> None:
        if isinstance(node, ast.Expr):
            if isinstance(node.value, ast.Call) and _callee(node.value) not in HARMLESS:
                self.remove(node, function)
        elif isinstance(node, ast.Delete):
            self.remove(node, function)
        elif isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            written = any(_writes_state(target, global_names) for target in targets)
            if node.value is not None and (written or _saves(node.value)):
                self.remove(node, function)
            if written and not isinstance(node, ast.AugAssign):
                self.flip(node, function)
        elif isinstance(node, ast.With):
            self.null_context(node, function)
        elif isinstance(node, ast.Try) and node.finalbody:
            header = next(n for n in range(node.finalbody[0].lineno - 1, 0, -1) if "finally:" in self.lines[n - 1])
            self.on_success(node.finalbody, function, header, "__import__('sys').exc_info()[0] is None")

    def walk(self, body: list[ast.stmt], function: str, global_names: set[str]) -> None:
        for node in body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                inside = f"{function}.{node.name}" if function else node.name
                if isinstance(node, ast.ClassDef):
                    self.classes(node, inside)
                    continue
                names = {name for n in ast.walk(node) if isinstance(n, ast.Global) for name in n.names}
                self.walk(node.body, inside, names)
                continue
            if function:
                self.statement(node, function, global_names)
            for child in _bodies(node):
                self.walk(child, function, global_names)

    def classes(self, node: ast.ClassDef, name: str) -> None:
        # The class body itself holds constants; its methods hold the state.
        for method in node.body:
            if isinstance(method, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                self.walk([method], name, set())
            if isinstance(method, ast.FunctionDef) and method.name == "__exit__":
                arguments = method.args
                kind = f"{arguments.args[1].arg}" if len(arguments.args) > 1 else f"{arguments.vararg.arg}[0]"  # type: ignore
                self.on_success(method.body, f"{name}.__exit__", method.lineno, f"{kind} is None")


def _bodies(node: ast.AST) -> Iterator[list[ast.stmt]]:
    for name in ("body", "orelse", "finalbody"):
        yield getattr(node, name, [])
    for handler in getattr(node, "handlers", []):
        yield handler.body
    for case in getattr(node, "cases", []):
        yield case.body


def mutants_of(package: Path, folders: list[str]) -> list[Mutant]:
    """Return every mutant of the Python files in these folders of the package, in order of file and line."""
    found: list[Mutant] = []
    for folder in folders:
        for path in sorted((package / folder).rglob("*.py")):
            source = path.read_text()
            collector = _Collector(path.relative_to(package).as_posix(), source)
            collector.walk(ast.parse(source).body, "", set())
            found += sorted(collector.found, key=lambda mutant: (mutant.line, mutant.kind))
    return found
