# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""The fixture ``rng_guard``: fails a test in which a recompute moved a stream, or that leaves a stream bound.

Examples
--------
For one test, for a file, or for all tests below a ``conftest.py``::

    def test_my_layer(rng_guard):
        loss = te_checkpoint(layer, x).sum()
        loss.backward()
        assert rng_guard.recomputes == 1

    pytestmark = pytest.mark.usefixtures("rng_guard")

    @pytest.fixture(autouse=True)
    def guarded(rng_guard):
        return rng_guard
"""

# pytest loads this file in every session where the package is installed, whether or not a test asks for the fixture:
# nothing is imported here but pytest, see Note [Import is free].
from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from transformer_engine_ext.testing.guard import RNGGuard

__all__ = ["rng_guard"]


@pytest.fixture
def rng_guard() -> Iterator[RNGGuard]:
    """Watch the recomputes of this test; see ``transformer_engine_ext.testing.guard.RNGGuard``."""
    from transformer_engine_ext.testing.guard import RNGGuard

    with RNGGuard() as guard:
        yield guard


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Look at the guard when the test has run, so that the test fails, and not its teardown."""
    try:
        result = yield
    except BaseException:
        problems = _finish(item)
        if problems:  # beside the test's own failure
            item.add_report_section("call", "rng_guard", problems)
        raise
    problems = _finish(item)
    if problems:
        pytest.fail(problems, pytrace=False)
    return result


def _finish(item: pytest.Item) -> str:
    guard: RNGGuard | None = getattr(item, "funcargs", {}).get("rng_guard")
    return guard.finish() if guard is not None else ""
