"""`cpu-prefix-cache keep` with a disk that is frozen while the file `frozen` is there, and full while `full` is.

Both are in the folder that ODD_DISK names. A frozen disk holds the threads that read and write, as one does; a full one
refuses writes.
"""

import errno
import os
import sys
import time
from pathlib import Path

from cpu_prefix_cache.tools.cli import main

read, write = os.preadv, os.pwritev


def place():
    return Path(os.environ["ODD_DISK"])


def when_thawed():
    while (place() / "frozen").exists():
        time.sleep(0.005)


def odd_read(*arguments):
    when_thawed()
    return read(*arguments)


def odd_write(*arguments):
    when_thawed()
    if (place() / "full").exists():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return write(*arguments)


if __name__ == "__main__":
    os.preadv, os.pwritev = odd_read, odd_write
    sys.exit(main())
