"""What a model keeps for its tokens: groups of layers, the grid they share, keys of chunks."""
