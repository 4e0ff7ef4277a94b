"""`cpu-prefix-cache keep`."""
