# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""The qa scripts are valid shell, name every test file, and give every result file its own name."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from _helpers import REPO

# Note [Every test file is named in a qa script]
# The scripts list their test files one by one, as Transformer Engine's do, so that a level can be read off the script.
# A file that is in no list would be green forever without being run; the tests below find it.
SCRIPTS = sorted((REPO / "qa").glob("*/test.sh"))


def commands(text: str) -> str:
    """Return a script's text without its comments: a file named in a comment is not run."""
    return re.sub(r"(?m)^\s*#.*$", "", text)


def not_named(tests: list[str], scripts: list[str]) -> list[str]:
    """Return the paths of `tests` that no text in `scripts` names."""
    named = {path for text in scripts for path in re.findall(r"tests/pytorch/[\w/]*test_\w+\.py", commands(text))}
    return [test for test in tests if test not in named]


def xml_names(script: str) -> Counter[str]:
    return Counter(re.findall(r"--junitxml=(\S+)", commands(script)))


def test_every_test_file_is_named() -> None:
    # See Note [Every test file is named in a qa script]
    tests = [str(path.relative_to(REPO)) for path in sorted((REPO / "tests").rglob("test_*.py"))]
    assert "tests/pytorch/test_qa_scripts.py" in tests
    assert not_named(tests, [script.read_text() for script in SCRIPTS]) == []


def test_every_named_file_exists() -> None:
    for script in SCRIPTS:
        for path in re.findall(r"\b(?:tests|qa)/\w[\w/]*\.\w+", commands(script.read_text())):
            assert (REPO / path).is_file(), f"{script.relative_to(REPO)} names {path}, which does not exist"


def test_a_file_that_is_not_named_is_found() -> None:
    scripts = ["pytest tests/pytorch/test_a.py", "# pytest tests/pytorch/test_b.py", "pytest tests/pytorch/x/test_c.py"]
    tests = ["tests/pytorch/test_a.py", "tests/pytorch/test_b.py", "tests/pytorch/test_c.py"]
    assert not_named(tests, scripts) == ["tests/pytorch/test_b.py", "tests/pytorch/test_c.py"]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.parent.name)
def test_script(script: Path) -> None:
    text = script.read_text()
    subprocess.run(["bash", "-n", str(script)], check=True, stdin=subprocess.DEVNULL)
    assert re.fullmatch(r"L[0-3]_pytorch_[a-z_]+", script.parent.name)
    assert [name for name, count in xml_names(text).items() if count > 1] == []
    assert text.count("python3 -m pytest") == sum(xml_names(text).values()), "a pytest call without its --junitxml"
    if " -n $" in commands(text):
        # A file's tests share the processes that one of them starts, and the script's order has a reason.
        assert " --dist loadfile --no-loadscope-reorder " in commands(text)
    if "test_fail" in text:
        assert 'if [ "$RET" -ne 0 ]' in text, "failures are recorded, but do not make the script fail"


def test_xml_names_that_repeat_are_found() -> None:
    assert xml_names("pytest --junitxml=$X/a.xml t.py\npytest --junitxml=$X/a.xml u.py") == {"$X/a.xml": 2}


STEPS = ("lint", "docs", "wheel", "unittest")


@pytest.mark.parametrize("failing", ["", *STEPS])
def test_ci_fails_where_a_script_fails(failing: str, tmp_path: Path) -> None:
    """With scripts that only say that they ran, and without installing anything."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(REPO / ".ci" / "run", tmp_path / ".ci")
    for step in STEPS:
        script = tmp_path / "qa" / f"L0_pytorch_{step}" / "test.sh"
        assert (REPO / script.relative_to(tmp_path)).is_file()
        script.parent.mkdir(parents=True)
        script.write_text(f"echo '{step} ran'\nexit {int(step == failing)}\n")
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "pip").write_text("#!/bin/sh\n")
    (programs / "python3").write_text(
        '#!/bin/sh\nif [ "$2" = venv ]; then mkdir -p .ci-venv/bin; :> .ci-venv/bin/activate; fi'
    )
    for program in programs.iterdir():
        program.chmod(0o755)
    env = {**os.environ, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    command = ["bash", str(tmp_path / ".ci" / "run")]
    done = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert (done.returncode == 0) == (not failing), done.stdout + done.stderr
    ran = re.findall(r"^(\w+) ran$", done.stdout, re.MULTILINE)
    # Nothing is tested that is not clean; what ran beside the failing step is shown all the same.
    assert ran == {"": ["wheel", "lint", "docs", "unittest"], "lint": ["wheel", "lint"]}.get(
        failing, ["wheel", "lint", "docs", *(["unittest"] if failing == "unittest" else [])]
    )
    assert done.stdout.endswith("unittest ran\n") == (failing in ("", "unittest"))
