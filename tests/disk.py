"""A disk that is full, for one file."""

import errno
import os
from contextlib import contextmanager
from unittest.mock import patch


@contextmanager
def full_for(name):
    """Within it no file of this name gets onto the disk."""
    sync = os.fsync

    def full(file):
        if f"/.{name}.tmp-" in os.readlink(f"/proc/self/fd/{file}"):
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(file)

    with patch.object(os, "fsync", full):
        yield
