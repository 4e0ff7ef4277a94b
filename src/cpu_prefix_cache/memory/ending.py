"""Ending objects that have threads of their own.

The garbage collector may finalize such an object in one of its own threads, which cannot wait for its own end.
"""

import os
import threading
from collections.abc import Callable, Collection


def end_outside_of(threads: Collection[threading.Thread], process: int, end: Callable[[], object]) -> None:
    """Call `end`, which waits for the end of these threads of a process; in a new thread if the caller is one of them.
    Another process, which is a fork, has no such threads: there it does nothing."""
    if os.getpid() != process:
        return
    if threading.current_thread() in threads:
        threading.Thread(target=end, name="end-own-threads").start()
    else:
        end()
