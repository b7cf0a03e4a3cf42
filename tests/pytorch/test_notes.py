# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Rules are written once and pointed at, source files carry the licence header, and none grows too long."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import pytest

from _helpers import REPO
from _source import source_files

HEADER = [" Copyright (c) 2026, transformer-engine-ext authors.", " SPDX-License-Identifier: Apache-2.0"]

MAX_LINES = 400

# Note [Notes]
# A rule is written once, in a comment that starts like this one, beside the code that keeps it. Every other place that
# depends on it says "See" and the title as above, in brackets. A title so stays findable with grep, is unique, and a
# note that nobody points at has been forgotten or belongs into an ordinary comment.
DEFINITION = re.compile(r"^\s*(?:#|//) Note \[([^\]\n]+)\]\s*$", re.MULTILINE)
POINTER = re.compile(r"\b[Ss]ee Note \[([^\]\n]+)\]")

#: Other spellings, which a search for the right one would miss.
MISSPELT = re.compile(r"(?:#|//)\s*(?:NOTE|note|Notes?:?)\s*\[|Note\[|[Ss]ee (?:NOTE|note) ?\[")


def note_problems(files: list[Path], root: Path) -> list[str]:
    """Return one line of text for every note or pointer in `files` that breaks Note [Notes]."""
    defined, pointed = defaultdict(list), defaultdict(list)
    problems = []
    for file in files:
        for number, line in enumerate(file.read_text().splitlines(), 1):
            where = f"{file.relative_to(root)}:{number}"
            for title in DEFINITION.findall(line):
                defined[title].append(where)
            for title in POINTER.findall(line):
                pointed[title].append(where)
            if MISSPELT.search(line) and not DEFINITION.search(line):
                problems.append(f"{where}: write '# Note [Title]' or '# See Note [Title]'")
    for title, places in pointed.items():
        if title not in defined:
            problems.append(f"Note [{title}] does not exist, pointed at from {', '.join(places)}")
    for title, places in defined.items():
        if len(places) > 1:
            problems.append(f"Note [{title}] is written more than once: {', '.join(places)}")
        if title not in pointed:
            problems.append(f"{places[0]}: nothing points at Note [{title}]")
    return problems


def header_problems(files: list[Path], root: Path) -> list[str]:
    """Return one line of text for every file that lacks the header or is too long."""
    problems = []
    for file in files:
        lines = file.read_text().splitlines()
        mark = "//" if file.suffix in (".cpp", ".h", ".cu") else "#"
        if lines[:2] != [mark + line for line in HEADER]:
            problems.append(f"{file.relative_to(root)}: does not start with the two header lines")
        if len(lines) > MAX_LINES:
            problems.append(f"{file.relative_to(root)}: {len(lines)} lines, more than {MAX_LINES}: split it")
    return problems


@pytest.fixture(scope="module")
def ours() -> list[Path]:
    files = [file for file in source_files() if file != Path(__file__).resolve()]  # has wrong notes on purpose
    assert REPO / ".ci" / "run" in files
    assert REPO / "transformer_engine_ext" / "errors.py" in files
    return files


def test_every_pointer_has_its_note_and_every_note_a_pointer(ours: list[Path]) -> None:
    # See Note [Notes]
    problems = note_problems(ours, REPO)
    assert not problems, "\n".join(problems)


def test_every_source_file_has_the_header_and_is_short(ours: list[Path]) -> None:
    problems = header_problems([*ours, Path(__file__).resolve()], REPO)
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("# See Note [Absent]", "does not exist"),
        ("    x = 1  # See Note [Absent]", "does not exist"),
        ("# Note [Lonely]", "nothing points at"),
        ("# Note [Twice]\n# Note [Twice]\n# See Note [Twice]", "more than once"),
        ("# NOTE [Shouted]", "write '# Note"),
        ("# see note [Whispered]", "write '# Note"),
    ],
)
def test_a_wrong_note_is_found(tmp_path: Path, text: str, complaint: str) -> None:
    file = tmp_path / "wrong.py"
    file.write_text(text)
    assert any(complaint in problem for problem in note_problems([file], tmp_path))


def test_a_right_note_is_not_reported(tmp_path: Path) -> None:
    python, cpp = tmp_path / "right.py", tmp_path / "right.cpp"
    python.write_text('# Note [Right]\n# text\n"""See Note [Right] and, in C++, see Note [Other]."""\n')
    cpp.write_text("// Note [Other]\n")
    assert note_problems([python, cpp], tmp_path) == []


def test_a_missing_header_and_a_long_file_are_found(tmp_path: Path) -> None:
    file = tmp_path / "long.py"
    file.write_text("\n" * (MAX_LINES + 1))
    assert len(header_problems([file], tmp_path)) == 2
