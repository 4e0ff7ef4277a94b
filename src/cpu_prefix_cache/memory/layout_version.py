"""Version of the order of bytes in a piece, for pieces that outlive their process. Knows no torch."""

LAYOUT_VERSION = 2  # the order of `parts.canonical`, with the numbers of `parts.Role`
