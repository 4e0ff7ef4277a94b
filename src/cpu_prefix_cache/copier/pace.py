"""How fast loads are, learned from those that have ended: what the next ones will take, and the rate of the link."""

TELLING_BYTES = 16 << 20  # only larger loads measure the rate: smaller ones spend their time elsewhere
FASTEST = 1e-12  # seconds per byte: a load that took less has not crossed the link
SLOWER = 1.1  # the most that the pace slows down from one load to the next: a single load may have been held up
RATED_BYTES = 256 << 20  # larger loads give the link's rate within a quarter: the last 62 MiB are not timed
RATED_LOADS = 3  # the fastest of at least so many gives the rate, as any of them may have been held up


class Pace:
    """`seconds_per_byte` is None before the first load that is large enough; so is `bytes_per_second`."""

    def __init__(self) -> None:
        self.seconds_per_byte: float | None = None
        self._rated, self._fastest = 0, 0.0  # large loads, and the bytes per second of the fastest

    def learn(self, num_bytes: int, seconds: float) -> None:
        """A load of so many bytes took so long on the link."""
        if num_bytes < TELLING_BYTES or seconds < num_bytes * FASTEST:
            return
        taken = seconds / num_bytes
        known = taken if self.seconds_per_byte is None else self.seconds_per_byte
        self.seconds_per_byte = min(taken, known * SLOWER)
        if num_bytes >= RATED_BYTES:
            self._rated += 1
            self._fastest = max(self._fastest, 1 / taken)

    @property
    def bytes_per_second(self) -> float | None:
        """The rate of the link."""
        return self._fastest if self._rated >= RATED_LOADS else None
