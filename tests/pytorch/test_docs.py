# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Every sample of the documentation was run, and its lists (settings, errors, rules) are complete."""

from __future__ import annotations

import ast
import doctest
import importlib
import importlib.util
import pkgutil
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import transformer_engine_ext
from _helpers import REPO
from _samples import Sample, commands, run_apart, run_sample, samples
from _source import source_files
from transformer_engine_ext import errors
from transformer_engine_ext.cli import main
from transformer_engine_ext.pytorch.recompute import history

DOCS = REPO / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), *REPO.glob("*.md")])
PAGES = [page for page in PAGES if "_build" not in page.parts]

sys.path.append(str(DOCS / "_ext"))


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run in an empty folder, as the one rank of a job that torchrun started; take down what a sample set up."""
    monkeypatch.chdir(tmp_path)
    launched = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def run_page(page: Path) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    for sample in samples(page):
        if sample.language == "python" and not sample.note.startswith("run with "):
            run_sample(sample, names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPO)))
def test_samples_run(page: Path, elsewhere: None) -> None:
    run_page(page)


def wanted_settings() -> dict[str, list[Sample]]:
    found: dict[str, list[Sample]] = {}
    for page in PAGES:
        for sample in samples(page):
            if sample.note.startswith("run with "):
                found.setdefault(sample.note.removeprefix("run with "), []).append(sample)
    return found


@pytest.mark.parametrize("setting", ["NVTE_EXT_DEBUG=1", "NVTE_EXT_NATIVE=yes"])
def test_samples_run_with_a_setting(setting: str) -> None:
    run_apart(wanted_settings()[setting], setting)


def test_a_wrong_sample_is_found(tmp_path: Path) -> None:
    texts = {
        "```python\nx = 1\n```\n\n```python\nassert x == 2\n```\n": AssertionError,
        "```python\n>>> 1 + 1\n3\n```\n": AssertionError,
        "<!-- not run: no time -->\n```python\nx = 1\n```\n": AssertionError,
        "<!-- not run: needs a GPU -->\n```python\nfrom transformer_engine_ext import absent\n```\n": AttributeError,
        "<!-- run if absent -->\n```python\nx =\n```\n": SyntaxError,
        "<!-- setup\nraise KeyError\n-->\n": KeyError,
    }
    page = tmp_path / "page.md"
    for text, error in texts.items():
        page.write_text(text)
        with pytest.raises(error):
            run_page(page)
    page.write_text("<!-- run with NVTE_EXT_DEBUG=1 -->\n```python\nimport os\nos.environ['NVTE_EXT_DEBUG'] + 1\n```\n")
    with pytest.raises(AssertionError, match="TypeError"):
        run_apart(list(samples(page)), "NVTE_EXT_DEBUG=1")


def test_every_setting_that_a_sample_wants_is_tried() -> None:
    assert sorted(wanted_settings()) == ["NVTE_EXT_DEBUG=1", "NVTE_EXT_NATIVE=yes"]


def test_commands_exist(capsys: pytest.CaptureFixture[str]) -> None:
    found = [words for page in PAGES for words in commands(page)]
    assert {"demo", "doctor", "inspect", "run"} <= {words[1] for words in found if len(words) > 1}
    for words in found:
        with pytest.raises(SystemExit):
            main([*words[1:2], "--help"])
        shown = capsys.readouterr().out
        for option in words[2:]:
            if words[1:2] == ["run"] and not option.startswith("-"):
                break  # the script's own from here on
            if option.startswith("-"):
                assert option.partition("=")[0] in shown, f"{' '.join(words)}: no option {option}"


def modules() -> Iterator[str]:
    for module in pkgutil.walk_packages(transformer_engine_ext.__path__, "transformer_engine_ext."):
        if not module.name.endswith("__main__"):
            yield module.name


@pytest.mark.parametrize("command", ["demo", "doctor", "inspect", "run"])
def test_every_option_and_exit_code_of_a_command_is_described(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    page = (DOCS / "commands.md").read_text()
    section = re.search(rf"^## te-ext {command}$(.*?)(?=^## )", page, re.MULTILINE | re.DOTALL)
    assert section is not None
    with pytest.raises(SystemExit):
        main([command, "--help"])
    shown = capsys.readouterr().out
    described = set(re.findall(r"^\| `(-[-\w]+|[A-Z0-9]+)\b", section[1], re.MULTILINE))
    assert described == set(re.findall(r"^  (?:-h, --help  *)?(-[-\w]+|[A-Z0-9]+)\b", shown, re.MULTILINE)) - {"-h"}
    column = [row[1:-1].split("|") for row in re.findall(r"^\|.*\|$", page.partition("## Exit codes")[2], re.MULTILINE)]
    place = [cell.strip() for cell in column[0]].index(f"`{command}`")
    meanings = {row[0].strip(): row[place].strip() for row in column[2:6]}
    for code in re.findall(r"(?<=[:,] )([0-3]) ", " ".join(shown.partition("Exit codes")[2].split())):
        assert meanings[code] not in ("", "\N{EN DASH}"), f"te-ext {command}: exit code {code}"


def test_every_command_has_its_section(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    commands_there = re.findall(r"^    (\w+)  ", shown, re.MULTILINE)
    assert len(commands_there) >= 4
    page = (DOCS / "commands.md").read_text()
    assert re.findall(r"^## te-ext (\w+)$", page, re.MULTILINE) == [
        name for name in ("demo", "doctor", "inspect", "run") if name in commands_there
    ]
    assert len(commands_there) == 4
    for code in ("129", "130", "141", "143"):
        assert code in shown
        assert f"| {code} |" in page


def test_links_lead_somewhere() -> None:
    """Sphinx looks after those between pages; these are the ones that are read in a checkout or on a hosting site."""
    for page in PAGES:
        text = re.sub(r"`[^`\n]*`|^```.*?^```$|<!--.*?-->", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        for target in re.findall(r"\]\(([^)\s]+)\)|^\[[^\]]+\]: (\S+)$", text, re.MULTILINE):
            link = "".join(target)
            if not re.match(r"https?://|#", link):
                assert (page.parent / link.partition("#")[0]).exists(), f"{page.name}: {link}"


def test_the_debug_mode_remembers_as_many_runs_as_the_pages_say() -> None:
    for page in ("environment.md", "debugging.md"):
        assert f"last {history.LENGTH} runs of regions" in " ".join((DOCS / page).read_text().split())


def test_docstring_examples_run() -> None:
    tried = 0
    for name in modules():
        module = importlib.import_module(name)
        for test in doctest.DocTestFinder(exclude_empty=True).find(module, name):
            report: list[str] = []
            result = doctest.DocTestRunner().run(test, out=report.append)
            assert not result.failed, "".join(report)
            tried += result.attempted
    assert tried >= 3


def headings(page: str) -> list[str]:
    return re.findall(r"^#{2,3} `(\w+)`$", (DOCS / page).read_text(), re.MULTILINE)


def settings() -> set[str]:
    mine = Path(__file__).resolve()
    found = set()
    for file in [*source_files(), REPO / "pyproject.toml"]:
        if file != mine:
            found.update(re.findall(r"\bNVTE_EXT_[A-Z0-9_]+\b", file.read_text()))
    return found - {"NVTE_EXT_SOMETHING"}  # of a test of how any setting is read


def test_every_setting_is_described_once() -> None:
    described = headings("environment.md")
    assert sorted(described) == sorted(settings())


def test_every_error_is_described_once() -> None:
    assert sorted(headings("errors.md")) == sorted(errors.__all__)


def covered(text: str, pieces: list[str]) -> float:
    """Return which share of a text consists of some of the pieces; white space does not count."""
    text = "".join(text.split())
    found = [False] * len(text)
    for piece in pieces:
        start = text.find(piece)
        while start >= 0:
            found[start : start + len(piece)] = [True] * len(piece)
            start = text.find(piece, start + 1)
    return sum(found) / len(text)


def test_texts_of_errors_that_need_a_gpu_or_ranks_are_those_of_the_sources() -> None:
    pieces = set()
    for file in source_files():
        if REPO / "transformer_engine_ext" in file.parents and file.suffix == ".py":
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    pieces.add("".join(node.value.split()))
    long_enough = [piece for piece in pieces if len(piece) >= 10]
    texts = [sample.code for sample in samples(DOCS / "errors.md") if sample.language == "text"]
    assert len(texts) >= 5
    for text in texts:
        without_table = "\n".join(line for line in text.splitlines() if not re.match(r"\s+(\d|rank |seed )", line))
        assert covered(without_table, long_enough) > 0.6, text
    assert covered("a text that no source has", long_enough) < 0.5


@pytest.mark.parametrize("name", errors.__all__)
def test_an_error_has_base_cause_and_remedy(name: str) -> None:
    section = re.search(rf"^## `{name}`$(.*?)(?=^## |\Z)", (DOCS / "errors.md").read_text(), re.MULTILINE | re.DOTALL)
    assert section is not None
    base = getattr(errors, name).__mro__[1:]
    builtin = next(cls for cls in base if cls.__module__ != errors.__name__)
    assert f"*Also a* `{builtin.__name__}`" in section[1]
    if name != "TEExtError":
        for part in ("*Cause.*", "*Remedy.*", "```"):
            assert part in section[1], f"{name}: no {part}"


def test_every_public_name_is_in_the_reference() -> None:
    pages = "\n".join(page.read_text() for page in (DOCS / "api").glob("*.md"))
    public = {
        *transformer_engine_ext.__all__,
        *transformer_engine_ext.pytorch.__all__,
        *transformer_engine_ext.distributed.__all__,
    }
    modules_and_aliases = {"__version__", "distributed", "pytorch", "checkpoint"}
    private = {name for name in public if name.startswith("_")}
    missing = [
        name for name in sorted(public - modules_and_aliases - private) if not re.search(rf"\b{name}$", pages, re.M)
    ]
    assert not missing


def test_the_page_of_rules_has_every_note() -> None:
    pytest.importorskip("sphinx")
    from rules import find_rules, layer_of

    rules = find_rules()
    titles = [rule.title for rule in rules]
    noted = re.compile(r"^\s*(?:#|//) Note \[([^\]\n]+)\]$", re.MULTILINE)
    package = REPO / "transformer_engine_ext"
    expected = [
        title for file in source_files() if package in file.parents for title in noted.findall(file.read_text())
    ]
    assert sorted(titles) == sorted(expected)
    assert len(titles) > 40
    for rule in rules:
        assert layer_of(rule)
        assert len(" ".join(rule.text)) > 40, f"Note [{rule.title}] is empty"


def test_the_picture_shows_what_it_says() -> None:
    spec = importlib.util.spec_from_file_location("masks", DOCS / "pictures" / "masks.py")
    assert spec is not None
    assert spec.loader is not None
    picture = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(picture)
    differ = [int((forward != recompute).sum()) for forward, recompute in map(picture.masks, picture.METHODS)]
    assert differ[0] > picture.SIDE**2 // 3
    assert differ[1] == 0
    for page in (REPO / "README.md", DOCS / "index.md"):
        assert f"{differ[0]:,} of {picture.SIDE**2:,} elements differ" in " ".join(page.read_text().split())
    assert (DOCS / "pictures" / "masks.png").stat().st_size < 100_000
