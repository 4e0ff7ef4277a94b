"""The rank side of a tier in files: slots on a local disk, one for each block that the tier above may give it."""
