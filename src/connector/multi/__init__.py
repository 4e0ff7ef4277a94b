"""Several caches beside each other: whose hit is loaded, and how fast each of them loads. Knows no engine."""
