"""The process that keeps one pool for the engines of a node, and an engine's link to it: sockets, files, threads."""
