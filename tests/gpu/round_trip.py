"""A short round trip through both ways, for `make sanitize`: every byte is compared, and compute-sanitizer watches."""

import sys

from tests.gpu.stage import Stage


def main() -> int:
    right = True
    for layers, fragment in ((3, 18 * 1024), (5, 1000), (2, 1 << 20)):
        stage = Stage(layers, fragment, blocks=24)
        right &= stage.round_trip()
        print(
            f"{layers} x {fragment} bytes: {'right' if right else 'WRONG'} bytes, {stage.reason.split(';')[1].strip()}"
        )
        stage.arena.close()
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
