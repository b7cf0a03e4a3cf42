# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Starts the demo's ranks, watches them, and ends them all when one fails."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from transformer_engine_ext.cli import demo_store
from transformer_engine_ext.errors import PeerFailureError

__all__ = ["Launcher"]

# A rank that learns of a peer's end reports within 5 s even from inside a collective; see demo_rank.
_REPORT_SECONDS = 15.0
_POLL_SECONDS = 0.05

# What a rank runs. Not -m, which looks for modules in the current folder first: a queue.py there would take the place
# of the standard library's. Last in the path, the folder of this package is found also where it is not installed.
_START = """\
import sys
sys.path[:] = [entry for entry in sys.path if entry] + [sys.argv[1]]
from transformer_engine_ext.cli.demo_worker import main
main(sys.argv[2], int(sys.argv[3]))
"""


class Launcher:
    """Starts the ranks of one or more launches; a context manager, in whose exit none of them is left.

    Parameters
    ----------
    folder : pathlib.Path
        Where configurations, results and logs go.
    config : dict
        What the workers need to know; see ``demo_worker``.
    progress : bool
        Whether rank 0 draws a bar on this process's standard error.
    """

    def __init__(self, folder: Path, config: dict[str, Any], *, progress: bool) -> None:
        self._folder, self._config = folder, config
        # A descriptor of its own, since the ranks' standard error goes to their logs.
        self._progress = os.dup(sys.stderr.fileno()) if progress else None
        self._launches = 0
        self._processes: list[subprocess.Popen[bytes]] = []
        # The store lives here: it is the one process that knows how every rank ended, and it outlives all of them.
        self._store = demo_store.host()

    def __enter__(self) -> Launcher:
        return self

    def __exit__(self, *exception: object) -> None:
        self._end_all()
        if self._progress is not None:
            os.close(self._progress)

    def run(self) -> list[dict[str, Any]]:
        """Start all ranks in new processes, wait for them, and return each one's results.

        Raises
        ------
        PeerFailureError
            If one died or failed; names it, and says what the others reported.
        """
        launch, ranks = self._launches, self._config["nproc"]
        self._launches += 1
        config = {**self._config, "launch": launch, "port": self._store.port, "folder": str(self._folder)}
        config["progress"] = self._progress
        path = self._folder / f"config-{launch}.json"
        path.write_text(json.dumps(config))
        # See Note [The demo leaves no process behind]
        self._processes = []
        for rank in range(ranks):
            with open(self._folder / f"log-{launch}-{rank}.txt", "wb") as log:
                self._processes.append(self._start(path, rank, log))
        self._watch(launch)
        self._end_all()
        return [json.loads((self._folder / f"result-{launch}-{rank}.json").read_text()) for rank in range(ranks)]

    def _start(self, config: Path, rank: int, log: IO[bytes]) -> subprocess.Popen[bytes]:
        settings = {
            "OMP_NUM_THREADS": "1",  # all ranks share this machine, and one order of summation per rank is enough
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # what torch.use_deterministic_algorithms asks for
        }
        if sys.platform == "linux" and "GLOO_SOCKET_IFNAME" not in os.environ:
            settings["GLOO_SOCKET_IFNAME"] = "lo"  # whatever the host's name resolves to
        root = str(Path(__file__).resolve().parents[2])
        return subprocess.Popen(
            [sys.executable, "-c", _START, root, str(config), str(rank)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            pass_fds=[] if self._progress is None else [self._progress],
            env={**os.environ, **settings},
            start_new_session=True,  # a Ctrl-C reaches the launcher only, which then ends the ranks
        )

    def _watch(self, launch: int) -> None:
        waiting = dict(enumerate(self._processes))
        first: tuple[int, int] | None = None
        deadline = float("inf")
        while waiting and time.monotonic() < deadline:
            for rank, process in list(waiting.items()):
                code = process.poll()
                if code is None:
                    continue
                del waiting[rank]
                if code and first is None:
                    first = rank, code
                    deadline = time.monotonic() + _REPORT_SECONDS
                    demo_store.post_notice(self._store, launch, f"rank {rank} {_describe_exit(code)}")
            time.sleep(_POLL_SECONDS)
        if first is not None:
            raise PeerFailureError(self._describe_failure(launch, *first))

    def _describe_failure(self, launch: int, rank: int, code: int) -> str:
        lines = [f"rank {rank} of {len(self._processes)} {_describe_exit(code)}; the demo cannot go on."]
        for other in range(len(self._processes)):
            path = self._folder / f"error-{launch}-{other}.json"
            if path.exists():
                details = json.loads(path.read_text())
                lines.append(f"  {details['type']}: {details['message']}")
                if other == rank and details["type"] != PeerFailureError.__name__:
                    lines.append(details["traceback"].rstrip())
            elif (self._folder / f"result-{launch}-{other}.json").exists():
                lines.append(f"  rank {other} had finished")
            elif other != rank:
                lines.append(f"  rank {other} reported nothing within {_REPORT_SECONDS:g} s and was ended")
        log = (self._folder / f"log-{launch}-{rank}.txt").read_text(errors="replace").strip()
        if log:
            lines.append(f"Last output of rank {rank}:\n{log[-2000:]}")
        return "\n".join(lines)

    def _end_all(self) -> None:
        for number, grace in ((signal.SIGTERM, 2.0), (signal.SIGKILL, 10.0)):
            alive = [process for process in self._processes if process.poll() is None]
            for process in alive:
                with suppress(ProcessLookupError):
                    process.send_signal(number)
            deadline = time.monotonic() + grace
            while any(process.poll() is None for process in alive) and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
        for process in self._processes:
            if process.stdin is not None:
                process.stdin.close()


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = "unknown"
    return f"died, killed by signal {-code} ({name})"
