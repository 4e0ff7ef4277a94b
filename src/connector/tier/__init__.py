"""Parts of a tier that connectors of engines with ranks share: its option, its identity, and the cache above it."""
