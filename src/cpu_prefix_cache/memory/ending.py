"""Ending objects that have threads of their own.

The garbage collector may finalize such an object in one of its own threads, which cannot wait for its own end.
"""

import threading
from collections.abc import Callable, Collection


def end_outside_of(threads: Collection[threading.Thread], end: Callable[[], object]) -> None:
    """Call `end`, which waits for the end of these threads; in a new thread if the caller is one of them."""
    if threading.current_thread() in threads:
        threading.Thread(target=end, name="end-own-threads").start()
    else:
        end()
