# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""The ``rules`` directive: all notes of the sources, in the order of the layers; and links to them from docstrings."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "transformer_engine_ext"

#: Folders in the order of the imports, what they are, and what a reader calls their rules.
LAYERS = (
    (f"{PACKAGE}/pytorch/rng", "Streams"),
    (f"{PACKAGE}/pytorch/recompute", "Regions"),
    (f"{PACKAGE}/pytorch/distributed", "Streams across ranks"),
    (f"{PACKAGE}/integrations", "Transformer Engine and Megatron"),
    (f"{PACKAGE}/testing", "Tests of code that uses the package"),
    (f"{PACKAGE}/cli", "The commands"),
    (PACKAGE, "The package"),
)

_DEFINITION = re.compile(r"^\s*(?:#|//) Note \[([^\]\n]+)\]\s*$")
_COMMENT = re.compile(r"^\s*(?:#|//) ?(.*)$")
_POINTER = re.compile(r"\b[Ss]ee\s+Note\s+\[([^\]]+)\]")
_MENTION = re.compile(r"(?<!`)Note\s+\[([^\]]+)\]")
_INLINE = re.compile(r"(``?)(.+?)\1|\*(\w(?:[^*]*\w)?)\*(?!\w)|\bNote \[([^\]]+)\]")

#: Those that the others build on, which come first in their part of the page.
FIRST = ("Saved states are values", "First touch", "Restore on every exit", "A region is independent of its neighbours")


@dataclass
class Rule:
    """A note: where it is written, its paragraphs, and the files that point at it."""

    title: str
    file: str
    line: int
    text: list[str]
    pointers: list[str] = field(default_factory=list)

    @property
    def anchor(self) -> str:
        """The label of its section."""
        return anchor_of(self.title)


def anchor_of(title: str) -> str:
    """Return the label of the section of the rule with that title."""
    return "rule-" + re.sub(r"\W+", "-", title.lower()).strip("-")


def find_rules(root: Path = ROOT) -> list[Rule]:
    """Return all notes of the package, in the order of the files."""
    rules: list[Rule] = []
    pointers: dict[str, set[str]] = defaultdict(set)
    for file in sorted((root / PACKAGE).rglob("*")):
        if file.suffix not in (".py", ".cpp", ".h"):
            continue
        name, text = str(file.relative_to(root)), file.read_text()
        lines = text.splitlines()
        for title in _POINTER.findall(text):
            pointers[" ".join(title.split())].add(name)
        for number, line in enumerate(lines):
            if definition := _DEFINITION.match(line):
                rules.append(Rule(definition[1], name, number + 1, _comment_below(lines, number + 1)))
    for rule in rules:
        rule.pointers = sorted(pointers[rule.title])
    return rules


def _comment_below(lines: list[str], first: int) -> list[str]:
    text = []
    for line in lines[first:]:
        comment = _COMMENT.match(line)
        if comment is None:
            break
        text.append(comment[1])
    return text


def layer_of(rule: Rule) -> str:
    """Return the title of the part of the page that a rule belongs to."""
    return next(title for folder, title in LAYERS if rule.file.startswith(folder + "/"))


class Rules(SphinxDirective):
    """Writes all rules."""

    def run(self) -> list[nodes.Node]:
        """Return a section for each layer."""
        rules = sorted(find_rules(), key=lambda rule: [rule.title != title for title in FIRST])
        for rule in rules:
            self.env.note_dependency(str(ROOT / rule.file))
        sections: list[nodes.Node] = []
        for _, title in LAYERS:
            own = [rule for rule in rules if layer_of(rule) == title]
            if own:
                section = nodes.section("", nodes.title(text=title), ids=[nodes.make_id("rules-" + title)])
                section += [self._section(rule) for rule in own]
                sections.append(section)
        return sections

    def _section(self, rule: Rule) -> nodes.section:
        section = nodes.section("", nodes.title(text=rule.title), ids=[rule.anchor], names=[rule.anchor])
        self.state.document.note_explicit_target(section, section)
        section += _paragraphs(rule.text)
        places = [name for name in rule.pointers if name != rule.file]
        where = nodes.paragraph(
            "", "", nodes.emphasis(text="Written in "), nodes.literal(text=f"{rule.file}:{rule.line}")
        )
        if places:
            where += nodes.emphasis(text="; kept in ")
            for index, place in enumerate(places):
                where += [nodes.Text(", ")] if index else []
                where += nodes.literal(text=place.removeprefix(PACKAGE + "/"))
        section += where
        return section


def _paragraphs(lines: list[str]) -> list[nodes.Node]:
    """Return paragraphs and lists; lines of a list start with ``- ``, and go on indented."""
    found: list[nodes.Node] = []
    block: list[str] = []
    items: list[list[str]] = []

    def close() -> None:
        if block:
            found.append(nodes.paragraph("", "", *_inline(" ".join(block))))
        if items:
            bullets = nodes.bullet_list()
            bullets += [nodes.list_item("", nodes.paragraph("", "", *_inline(" ".join(item)))) for item in items]
            found.append(bullets)
        block.clear()
        items.clear()

    for line in lines:
        if line.startswith("- "):
            if block:
                close()
            items.append([line[2:].strip()])
        elif items and line.startswith("  "):
            items[-1].append(line.strip())
        elif not line.strip():
            close()
        else:
            if items:
                close()
            block.append(line.strip())
    close()
    return found


def _inline(text: str) -> list[nodes.Node]:
    found: list[nodes.Node] = []
    start = 0
    for match in _INLINE.finditer(text):
        found.append(nodes.Text(text[start : match.start()]))
        if match[4]:
            found.append(nodes.reference("", match[4], refid=anchor_of(match[4])))
        else:
            found.append(nodes.literal(text=match[2]) if match[1] else nodes.emphasis(text=match[3]))
        start = match.end()
    return [*found, nodes.Text(text[start:])]


def link_notes(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Turn ``Note [Title]`` in a docstring into a link to the page of the rules."""
    anchors = {rule.title: rule.anchor for rule in find_rules()}
    text = _MENTION.sub(lambda match: _link(match, anchors), "\n".join(lines))
    lines[:] = text.split("\n")


def _link(match: re.Match[str], anchors: dict[str, str]) -> str:
    title = " ".join(match[1].split())
    return f":ref:`{title} <{anchors[title]}>`" if title in anchors else match[0]


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directive."""
    app.add_directive("rules", Rules)
    app.connect("autodoc-process-docstring", link_notes)
    return {"version": "1", "parallel_read_safe": True}
