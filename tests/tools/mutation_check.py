# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Would the tests notice? Take away every line that saves, rewinds, restores or flags, one at a time, and run them.

    python tests/tools/mutation_check.py --jobs 2
    python tests/tools/mutation_check.py --only rng/tracker.py --markdown table.md

torch is imported once; each mutant runs in a fork of that process, in a copy of the repository, with the tests that
reach the line (measured first, in the same way), quickest first, until one fails. The exit code is 1 if a mutant that
`mutation_survivors.txt` does not explain survives or is reached by no test, or if that list names one that is killed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _mutants import Mutant, mutants_of
from _mutation_runs import Baseline, Job, import_once, start_baseline, start_mutant

REPO = Path(__file__).resolve().parents[2]
PACKAGE = "transformer_engine_ext"
FOLDERS = ["pytorch/rng", "pytorch/recompute"]
# They build and load the native part; no stream's state passes through them.
BUILDING = re.compile(r"rng/native\w*\.py")
ALLOWED = Path(__file__).with_name("mutation_survivors.txt")

# These read sources, start processes that only import, try the tests' own tools, or are about the layers above.
BLIND = re.compile(
    r"test_(notes|layering|qa_scripts|imports|helpers|proof|wheel|demo|cli|broken|error_text)\w*\.py$"
    r"|test_(parallel_rng|rng_file|streams|derivations|collisions|topology|resharding|verify|save_load|resume|inspect|megatron|dcp|integration|patch|doctor)\w*\.py$"
)
# Files with lines that run in worker processes only, where no coverage is measured, or once in a process, so that only
# the first test seems to reach them: the tests to try besides.
BESIDES = {
    "pytorch/recompute/saved_activations.py": "test_saved_activations",
    "pytorch/recompute/ambient.py": "autocast|surroundings|gaps_settings",
    "pytorch/recompute/hooks.py": "region_hooks|test_fp8_state",
    "pytorch/recompute/region.py": "debug_mode|debug_history",
    "pytorch/recompute/debug.py": "debug_mode|debug_history",
    "pytorch/rng/devices.py": "test_backends|gaps_more",
    "pytorch/rng/cpu_backend.py": "test_backends|gaps_more|test_moves",
    "pytorch/rng/recording.py": "debug_mode",
}
FIRST = 12  # tests of the first try; most mutants end there


@dataclass
class Result:
    """How one mutant ended."""

    mutant: Mutant
    verdict: str  # "killed", "SURVIVED" or "not reached"
    by: str
    seconds: float = 0.0


@dataclass
class Slot:
    """A copy of the repository in which one job runs at a time."""

    root: Path
    job: Job | None = None

    @classmethod
    def make(cls, repository: Path, folder: Path) -> Slot:
        for name in (PACKAGE, "tests", "qa"):
            shutil.copytree(repository / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", ".*"))
        shutil.copy(repository / "pyproject.toml", folder)
        return cls(folder)

    def write(self, file: str, source: str) -> None:
        path = self.root / PACKAGE / file
        path.write_text(source)
        # A compiled file of the same second and size would be taken for this one's.
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            compiled.unlink()


@dataclass
class Check:
    """All mutants on their way: a queue, the slots, and what is known so far."""

    baseline: Baseline
    slots: list[Slot]
    limit: float
    log: Path | None = None
    killers: Counter[str] = field(default_factory=Counter)
    results: list[Result] = field(default_factory=list)

    def tests_for(self, mutant: Mutant) -> list[str]:
        reaching = self.baseline.reaching(mutant.file, mutant.line, mutant.last_line)
        pattern = BESIDES.get(mutant.file)
        if pattern:
            reaching |= {test for test in self.baseline.seconds if re.search(pattern, test)}
        return sorted(
            reaching,
            key=lambda test: (
                -self.killers[test] if self.baseline.seconds[test] < 1 else 0,
                self.baseline.seconds[test],
                test,
            ),
        )

    def run(self, mutants: list[Mutant]) -> None:
        queue = [(mutant, tests, 0.0) for mutant in mutants if (tests := self.tests_for(mutant))]
        reached = {id(mutant) for mutant, _, _ in queue}
        self.results += [Result(mutant, "not reached", "") for mutant in mutants if id(mutant) not in reached]
        queue.reverse()
        waiting: dict[int, tuple[Mutant, list[str], float]] = {}
        while queue or waiting:
            for number, slot in enumerate(self.slots):
                if slot.job is None and queue:
                    mutant, tests, spent = queue.pop()
                    tests = tests if spent else self.tests_for(mutant)  # killers are known better by now
                    now, later = (tests[:FIRST], tests[FIRST:]) if not spent else (tests, [])
                    slot.write(mutant.file, mutant.source)
                    slot.job = start_mutant(slot.root, now, max(self.limit, 5 * self.baseline.expected(now)))
                    waiting[number] = (mutant, later, spent)
                elif slot.job is not None and slot.job.done():
                    mutant, later, spent = waiting.pop(number)
                    verdict, by = slot.job.verdict()
                    spent += slot.job.seconds
                    slot.job = None
                    slot.write(mutant.file, mutant.original)
                    if verdict == "passed" and later:
                        queue.append((mutant, later, spent))
                        continue
                    self.killers[by] += 1
                    self.report(Result(mutant, "SURVIVED" if verdict == "passed" else "killed", by, spent))
            time.sleep(0.02)

    def report(self, result: Result) -> None:
        self.results.append(result)
        if self.log is not None:
            with self.log.open("a") as log:
                log.write(
                    json.dumps([result.mutant.place, result.verdict, result.by, result.seconds, result.mutant.key])
                    + "\n"
                )
        mutant = result.mutant
        print(
            f"{result.verdict:<8} {result.seconds:5.1f} s  {mutant.file}:{mutant.line} [{mutant.kind}] {mutant.text}"
            f"{'  <- ' + result.by if result.by else ''}",
            flush=True,
        )


def resume(log: Path | None, root: Path, tests: list[str]) -> tuple[Baseline, dict[str, list[Any]]]:
    """Return the baseline and the verdicts by mutant that a former run on the same sources left in `log`, if any."""
    digest = hashlib.sha256()
    for path in sorted([*(root / PACKAGE).rglob("*.py"), *(root / "tests").rglob("*.py")]):
        digest.update(path.read_bytes())
    lines = log.read_text().splitlines() if log is not None and log.exists() else []
    if lines and json.loads(lines[0])["digest"] == digest.hexdigest():
        found = json.loads(lines[0])
        return Baseline.from_json(found["baseline"]), {line[0]: line[1:] for line in map(json.loads, lines[1:])}
    baseline = start_baseline(root, PACKAGE, tests)
    if log is not None:
        log.write_text(json.dumps({"digest": digest.hexdigest(), "baseline": asdict(baseline)}) + "\n")
    return baseline, {}


def killed_by(log: Path) -> set[str]:
    """Return the keys of the mutants that a former run killed, perhaps of somewhat other sources."""
    lines = [json.loads(line) for line in log.read_text().splitlines()[1:]]
    return {line[4] for line in lines if line[1] == "killed" and len(line) > 4}


def allowed_patterns(cuda: bool) -> dict[str, re.Pattern[str]]:
    """Read the list of survivors: a key a line (``*`` matches anything), below comments that say why.

    A line that starts with ``no cuda:`` holds on machines without CUDA only.
    """
    patterns: dict[str, re.Pattern[str]] = {}
    explained = False
    for line in ALLOWED.read_text().splitlines() if ALLOWED.exists() else []:
        if line.startswith("#") or not line.strip():
            explained = line.startswith("#")
            continue
        if not explained:
            raise SystemExit(f"{ALLOWED.name}: no comment above says why {line!r} may survive")
        tag, found, rest = line.partition("no cuda:")
        if found and not tag:
            if cuda:
                continue
            line = rest.strip()
        patterns[line] = re.compile(re.escape(line).replace(r"\*", ".*"))
    return patterns


def table(results: list[Result], allowed: set[str]) -> str:
    """Return all results as a Markdown table."""
    rows = ["| line | kind | what is taken away | result | first test that fails |", "|---|---|---|---|---|"]
    for result in sorted(results, key=lambda result: (result.mutant.file, result.mutant.line, result.mutant.kind)):
        mutant = result.mutant
        text = mutant.text.replace("|", "\\|")
        verdict = f"{result.verdict} (explained)" if mutant.key in allowed else result.verdict
        by = result.by.replace("tests/pytorch/", "").replace("|", "\\|")
        rows.append(f"| {mutant.file}:{mutant.line} | {mutant.kind} | `{text}` | {verdict} | {by} |")
    return "\n".join(rows) + "\n"


def conclude(results: list[Result], complete: bool, cuda: bool, markdown: str | None) -> int:
    """Print what is left to explain; return the exit code."""
    patterns = allowed_patterns(cuda)
    alive = [result for result in results if result.verdict != "killed"]
    used = {line for line, p in patterns.items() if any(p.fullmatch(result.mutant.key) for result in alive)}
    allowed = {result.mutant.key for result in alive if any(p.fullmatch(result.mutant.key) for p in patterns.values())}
    if markdown:
        Path(markdown).write_text(table(results, allowed))
    counts = Counter(result.verdict for result in results)
    print(
        f"\n{len(results)} mutants: {', '.join(f'{count} {verdict}' for verdict, count in sorted(counts.items()))}; "
        f"{len(allowed)} of the living are explained in {ALLOWED.name}"
    )
    unexplained = [result for result in alive if result.mutant.key not in allowed]
    for result in unexplained:
        print(f"  {result.verdict}: line {result.mutant.line}: {result.mutant.key}")
    stale = sorted(set(patterns) - used) if complete else []
    for line in stale:
        print(f"  no longer alive, so take it off {ALLOWED.name}: {line}")
    return 1 if unexplained or stale else 0


def main() -> int:
    """Run; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1, choices=[1, 2, 3, 4])
    parser.add_argument("--only", default="", help="part of the key of a mutant (file | function | kind | text)")
    parser.add_argument("--limit", type=float, default=20.0, help="seconds before a mutant counts as killed by hanging")
    parser.add_argument("--markdown", help="file for the table")
    parser.add_argument("--again", type=Path, help="log of a former run: only mutants that it did not kill")
    parser.add_argument("--log", type=Path, help="file of verdicts; a run that finds one on the same sources goes on")
    options = parser.parse_args()

    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        # Everything is read from the first copy, so that the repository may change meanwhile.
        root = Path(folder) / "0"
        slots = [Slot.make(REPO, root)]
        slots += [Slot.make(root, Path(folder) / str(number)) for number in range(1, options.jobs)]
        mutants = [mutant for mutant in mutants_of(root / PACKAGE, FOLDERS) if options.only in mutant.key]
        mutants = [mutant for mutant in mutants if not BUILDING.search(mutant.file)]
        if options.again is not None:
            killed = killed_by(options.again)
            mutants = [mutant for mutant in mutants if mutant.key not in killed]
        tests = [str(path.relative_to(root)) for path in sorted((root / "tests").rglob("test_*.py"))]
        tests = [test for test in tests if not BLIND.search(test)]
        import_once()
        baseline, known = resume(options.log, root, tests)
        print(f"{len(baseline.seconds)} tests pass without a mutant, {time.monotonic() - start:.0f} s", flush=True)
        for test in sorted(baseline.seconds, key=baseline.seconds.__getitem__)[-5:]:
            print(f"  {baseline.seconds[test]:5.1f} s {test}")
        for test in baseline.failed:
            print(f"  fails already, so it is left out: {test}")
        check = Check(baseline, slots, options.limit, options.log)
        check.results = [Result(mutant, *known[mutant.place][:3]) for mutant in mutants if mutant.place in known]
        mutants = [mutant for mutant in mutants if mutant.place not in known]
        try:
            check.run(mutants)
        finally:
            for slot in slots:
                if slot.job is not None:
                    slot.job.stop()
    code = conclude(check.results, not options.only and options.again is None, baseline.cuda, options.markdown)
    print(f"{time.monotonic() - start:.0f} s")
    return code


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["NVTE_EXT_TEST_PROGRAMS"] = "60"  # of the property test; enough to kill, and quick
    sys.exit(main())
