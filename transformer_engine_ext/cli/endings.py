# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""How a command ends when somebody else ends it: Ctrl-C, a signal, a reader of its output that has gone."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["end_on_signals", "run_to_an_end"]

#: What a shell reports for a process that a signal ended is this and the signal's number.
_SIGNALLED = 128


class Ended(BaseException):
    """A signal asks the process to end: unwinds it, so that folders and processes are cleared away."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextmanager
def end_on_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP unwind what runs inside, as Ctrl-C does; elsewhere they end the process on the spot."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python allows no handlers here
        return
    # A signal that is ignored (nohup) stays ignored.
    numbers = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is not signal.SIG_IGN]

    def end(number: int, frame: FrameType | None) -> None:
        for other in numbers:  # once is enough: a second one must not cut the clearing away short
            signal.signal(other, signal.SIG_IGN)
        raise Ended(number)

    before = {number: signal.signal(number, end) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_to_an_end(command: Callable[[], int], name: str) -> int:
    """Run a command, and return its exit code, or the one that a shell would report for how it was ended.

    Parameters
    ----------
    command : callable
        Returns the exit code.
    name : str
        What to call it in the message.
    """
    # Started with a closed descriptor (>&-), Python has None there, and the next file that is opened would take the
    # descriptor's number, so that others write into it.
    for stream, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, stream) is None:
            setattr(sys, stream, open(os.devnull, mode))  # noqa: SIM115 - for as long as the process lives
    try:
        code = command()
        sys.stdout.flush()  # a reader that has gone shows here, and not when the interpreter ends
    except KeyboardInterrupt:
        return _say(f"{name}: interrupted", signal.SIGINT)
    except Ended as end:
        return _say(f"{name}: ended by {signal.Signals(end.number).name}", end.number)
    except BrokenPipeError:
        if not _output_is_broken():
            raise  # some other pipe, or a socket: an error like any
        # What is still in the buffer has nowhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _SIGNALLED + signal.SIGPIPE
    return code


def _output_is_broken() -> bool:
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _say(message: str, number: int) -> int:
    print(message, file=sys.stderr)
    return _SIGNALLED + number
