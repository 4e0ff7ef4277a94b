"""KV of a model: groups of layers, the grid they share, keys of chunks."""
