"""The deciding half for an engine that names its blocks by keys, and has no requests to plug in."""
