"""Recognizes files that are no JSON, by how they begin, to name the remedy."""

import re

CSV = re.compile(rb"[\w\"' .:-]+(,([\w\"'.:-][\w\"' .:-]*)?)+\s*")  # no blank after a comma, as sentences have
PACKED = {b"\x1f\x8b": "gzip", b"\xfd7zXZ": "xz", b"BZh": "bzip2", b"(\xb5/\xfd": "zstd", b"PK\x03\x04": "zip"}


def other_format(first: bytes) -> str:
    """The end of a sentence on a file with this first line; empty if it may be JSON."""
    packed = next((name for magic, name in PACKED.items() if first.startswith(magic)), None)
    if packed is not None:
        return f"; it is packed with {packed}: unpack it first (only files whose names end in .gz are unpacked here)"
    if first.startswith(b"PAR1"):
        return "; it is Parquet: write it as JSON lines first"
    if CSV.fullmatch(first):
        return (
            "; it looks like CSV: JSON lines are needed, with prompts, token ids or ids of blocks, because numbers of "
            "tokens do not determine what prompts share"
        )
    return ""
