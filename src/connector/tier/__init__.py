"""What connectors of engines with ranks share of the tier: its option, whose bytes it holds, what a rank has of it."""
