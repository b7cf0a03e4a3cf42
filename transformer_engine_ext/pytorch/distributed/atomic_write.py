# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""Writing a file such that under its name there is always a whole one."""

from __future__ import annotations

import errno
import os
import stat
import time
import uuid
from contextlib import suppress

__all__ = ["check_target", "write_atomically"]

#: A temporary file that nobody has touched for this many seconds belongs to a writer that was killed.
_ABANDONED_SECONDS = 3600.0

# What a path may be besides an ordinary file, by the type bits of its mode.
_KINDS = {
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
}


def check_target(path: str | os.PathLike[str], verb: str) -> None:
    """Refuse a path that exists and is no ordinary file (links are followed); a path that is free passes.

    Raises
    ------
    IsADirectoryError
        If it is a folder.
    OSError
        If it is a device, a pipe or a socket, or cannot be looked at.
    """
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, f"cannot {verb} the streams: this is a folder; name a file in it", path)
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "no ordinary file")
        raise OSError(errno.EINVAL, f"cannot {verb} the streams: this is {kind}; name an ordinary file", path)


# Note [A save never damages the former file]
# The bytes go to a new file beside the target, reach the disk (fsync), and only then take the target's name in one
# atomic step; fsync of the directory makes the step itself durable. A kill at any point leaves the former file whole
# or the new one whole, and at worst a hidden *.tmp file that no reader looks at. Its name is unique, so it never gets
# into the way of a later save, and the first save an hour or more later removes it: by age and not at once, since it
# could belong to a writer that still runs, on another node too, where its process cannot be asked for.
def write_atomically(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file such that under its name there is always a whole one.

    A symbolic link stays one: what it points at is replaced. The permissions of a file that is replaced are kept.

    Raises
    ------
    FileNotFoundError
        If the folder does not exist.
    OSError
        If the target is no ordinary file, or cannot be written; the former file then is as it was.
    """
    check_target(path, "save")
    target = os.path.realpath(path)
    folder, name = os.path.split(target)
    if not os.path.isdir(folder):
        raise FileNotFoundError(
            errno.ENOENT, f"cannot save the streams: there is no folder {folder!r}; make it first", os.fspath(path)
        )
    _remove_abandoned(folder, name)
    temporary = os.path.join(folder, f".{name}.{uuid.uuid4().hex}.tmp")
    try:
        with open(temporary, "xb") as stream:
            with suppress(FileNotFoundError):
                os.fchmod(stream.fileno(), stat.S_IMODE(os.stat(target).st_mode))
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, target)
    except BaseException as error:
        with suppress(OSError):
            os.unlink(temporary)
        if isinstance(error, OSError):
            reason = error.strerror or str(error)
            text = f"cannot save the streams ({reason}); the former file, if there was one, is as it was"
            raise OSError(error.errno, text, os.fspath(path)) from error
        raise
    directory = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _remove_abandoned(folder: str, name: str) -> None:
    # See Note [A save never damages the former file]
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if not (entry.name.startswith(f".{name}.") and entry.name.endswith(".tmp")):
                continue
            with suppress(OSError):
                if time.time() - entry.stat(follow_symlinks=False).st_mtime > _ABANDONED_SECONDS:
                    os.unlink(entry.path)
