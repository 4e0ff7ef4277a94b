"""Deadlines of transfers under a server."""

LOAD_SECONDS = 30.0  # a load that has not begun by then fails, and its tokens are computed
