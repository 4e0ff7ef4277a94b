"""What connectors of engines with ranks share of the tier in files: its option, whose bytes it holds, a rank's slab."""
