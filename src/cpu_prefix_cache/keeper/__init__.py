"""One pool for the engines of a node: what its keeper decides, and what an engine decides over it."""
