"""The connector of ATOM: a host cache behind its block pool. How to use it: docs/atom.md; `register` in `plugin.py`."""
