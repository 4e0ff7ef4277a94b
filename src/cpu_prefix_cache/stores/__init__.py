"""Stores that several machines share, below host memory: what one must do, and those that are supported."""
