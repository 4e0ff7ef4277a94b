"""A tier below host memory, as the deciding half sees it: another cache, whose device is the host pool."""
