"""Stores and their times, loads that are worth it, and every copy in flight."""
