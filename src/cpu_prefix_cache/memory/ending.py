"""Ending what has threads of its own, whoever asks for it.

The garbage collector runs in whichever thread has just allocated something, so also in the threads of the very object
that it finds nobody keeps. A thread cannot wait for its own end: then another one ends the object.
"""

import threading
from collections.abc import Callable, Collection


def end_outside_of(threads: Collection[threading.Thread], end: Callable[[], object]) -> None:
    """Call `end`, which waits for the end of these threads; in a new thread if the caller is one of them."""
    if threading.current_thread() in threads:
        threading.Thread(target=end, name="end-own-threads").start()
    else:
        end()
