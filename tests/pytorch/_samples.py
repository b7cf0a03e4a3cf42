# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Code samples of Markdown files, for the tests that run them.

``python`` blocks of a page run in its order, in one namespace; a block with ``>>>`` is a doctest. A comment right above
a block says what is not to be seen on the page::

    <!-- not run: needs a GPU -->        compiled only, its imports from this package resolved
    <!-- run with NVTE_EXT_DEBUG=1 -->   in a process of its own, with that setting
    <!-- run if lightning -->            where that can be imported; else as "not run"
    <!-- setup                           runs too
    x = torch.ones(2)
    -->
"""

from __future__ import annotations

import ast
import doctest
import importlib
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _helpers import REPO

_BLOCK = re.compile(
    r"^(?:<!-- (?P<note>(?:not run:|run with|run if) [^\n]+) -->\n+)?"
    r"(?P<fence>`{3,})(?P<language>\w+)\n(?P<code>.*?)^(?P=fence)$"
    r"|^<!-- setup\n(?P<setup>.*?)^-->$",
    re.MULTILINE | re.DOTALL,
)

_FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@dataclass
class Sample:
    """One block: its language (``python`` for a setup), its code, the line it starts on, and the note above it."""

    file: Path
    line: int
    language: str
    code: str
    note: str = ""


def samples(file: Path) -> Iterator[Sample]:
    """Return the blocks of a Markdown file."""
    text = file.read_text()
    for match in _BLOCK.finditer(text):
        setup = match["setup"] is not None
        start = match.start("setup" if setup else "code")
        line = text.count("\n", 0, start) + 1
        yield Sample(
            file,
            line,
            *(("python", match["setup"]) if setup else (match["language"], match["code"])),
            match["note"] or "",
        )


def run_sample(sample: Sample, names: dict[str, Any]) -> None:
    """Run a sample of Python in a namespace, but not one that wants a setting; raises if it fails."""
    where = f"{sample.file.name}:{sample.line}"
    wanted = sample.note.removeprefix("run if ") if sample.note.startswith("run if ") else ""
    if sample.note.startswith("not run:") or (wanted and not _importable(wanted)):
        check_only(sample)
    elif ">>>" in sample.code:
        _run_doctest(sample, names, where)
    else:
        # With empty lines in front, so that a traceback has the page's own line numbers.
        code = compile("\n" * (sample.line - 1) + sample.code, str(sample.file), "exec")
        with warnings.catch_warnings():
            if wanted:
                warnings.simplefilter("ignore")  # other libraries warn of what they import
            exec(code, names)


def _importable(name: str) -> bool:
    try:
        importlib.import_module(name)
    except (ImportError, OSError):
        return False
    return True


def _run_doctest(sample: Sample, names: dict[str, Any], where: str) -> None:
    test = doctest.DocTestParser().get_doctest(sample.code, {}, where, str(sample.file), sample.line - 1)
    test.globs = names
    report: list[str] = []
    result = doctest.DocTestRunner(optionflags=_FLAGS).run(test, out=report.append, clear_globs=False)
    if result.failed:
        raise AssertionError("".join(report))


def run_apart(chosen: Sequence[Sample], setting: str) -> None:
    """Run samples one after the other, each in a namespace of its own, in one process with an environment variable."""
    name, _, value = setting.partition("=")
    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\nimport _samples\nfrom pathlib import Path\n"
        "for file, line in zip(sys.argv[2::2], map(int, sys.argv[3::2])):\n"
        "    sample = next(s for s in _samples.samples(Path(file)) if s.line == line)\n"
        "    sample.note = ''\n"
        "    _samples.run_sample(sample, {})\n"
    )
    places = [text for sample in chosen for text in (str(sample.file), str(sample.line))]
    command = [sys.executable, "-c", program, str(Path(__file__).parent), *places]
    environment = {**os.environ, name: value, "PYTHONPATH": str(REPO)}
    done = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120
    )
    if done.returncode:
        raise AssertionError(f"with {setting}:\n{done.stdout}{done.stderr}")


def check_only(sample: Sample) -> None:
    """Compile a sample that cannot be run here, and look up what it imports from this package."""
    if not re.match(r"not run: needs \w|run if \w", sample.note):
        raise AssertionError(f"{sample.file}:{sample.line}: say what it needs that is not here: {sample.note!r}")
    for node in ast.walk(ast.parse(sample.code)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("transformer_engine_ext"):
            module = importlib.import_module(str(node.module))
            for alias in node.names:
                getattr(module, alias.name)


def commands(file: Path) -> Iterator[list[str]]:
    """Return the words of each ``te-ext`` command in the shell blocks of a file."""
    for sample in samples(file):
        if sample.language in ("bash", "console", "sh"):
            for line in sample.code.replace("\\\n", " ").splitlines():
                for command in re.split(r"&&|\|", line.partition(" #")[0]):
                    words = command.split()
                    if words[:1] == ["te-ext"]:
                        yield words
                    elif "transformer_engine_ext" in words and words[words.index("transformer_engine_ext") - 1] == "-m":
                        yield words[words.index("transformer_engine_ext") :]
