"""Makes one trace of many sessions of kv-cache-tester, which all begin at 0: each begins at a random time.

    python -m benchmarks.deciding.sessions kv-cache-tester/traces --numbers 141,400,3 --hours 3 --out trace.jsonl

Sessions 141, 144, ..., 399 here; those that are not there are left out. Ids are joined to blocks of 512 tokens.
"""

import argparse
import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

BLOCK_TOKENS = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of trace_0001.json and so on")
    parser.add_argument("--numbers", default="141,400,3", help="first, end, step of the sessions (default 141,400,3)")
    parser.add_argument("--hours", type=float, default=3.0, help="over which sessions begin (default 3)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    chance = random.Random(options.seed)
    rows: list[tuple[float, list[str]]] = []
    for number in range(*map(int, options.numbers.split(","))):
        path = options.folder / f"trace_{number:04}.json"
        if path.exists():
            rows += requests(json.loads(path.read_text()), str(number), chance.random() * options.hours * 3_600)
    ids: dict[str, int] = {}
    with options.out.open("w") as out:
        for start, keys in sorted(rows):
            hash_ids = [ids.setdefault(key, len(ids)) for key in keys]
            line = {"timestamp": int(start * 1_000), "input_length": len(keys) * BLOCK_TOKENS, "hash_ids": hash_ids}
            print(json.dumps(line), file=out)


def requests(session: dict, name: str, start: float) -> Iterator[tuple[float, list[str]]]:
    """When each request of a session comes, and the keys of its whole blocks."""
    scope = name if session["hash_id_scope"] == "local" else ""
    for request in session["requests"]:
        keys = chained(request.get("hash_ids") or [], BLOCK_TOKENS // session["block_size"], scope)
        if keys:
            yield start + request["t"], keys


def chained(ids: Sequence[int], together: int, scope: str) -> list[str]:
    keys, key = [], scope
    for at in range(0, len(ids) // together * together, together):
        key = hashlib.blake2b(f"{key} {ids[at : at + together]}".encode(), digest_size=8).hexdigest()
        keys.append(key)
    return keys


if __name__ == "__main__":
    main()
