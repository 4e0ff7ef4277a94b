"""Parts of the tier that connectors of engines with ranks share: its option, whose bytes it holds, what a rank has."""
