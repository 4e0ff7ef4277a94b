"""`python node.py URL FILE`: gives memory to the cluster until it is killed, and reports in FILE."""

import sys
import time
from pathlib import Path

from cpu_prefix_cache.stores.mooncake_store import MooncakeStore

if __name__ == "__main__":
    store = MooncakeStore(sys.argv[1])
    Path(sys.argv[2]).touch()
    while True:
        time.sleep(1)
