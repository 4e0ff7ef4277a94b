"""Held blocks come back to where they waited, whatever else comes and goes."""

from hypothesis import example, given
from hypothesis import strategies as st

from cpu_prefix_cache.offload.places import FRONT, Places


class SlowOrder:
    """The order with what is held still in it: each entry is waiting or held."""

    def __init__(self, count: int) -> None:
        self.entries = [[at, "waits"] for at in range(count)]
        self.count = count

    def waiting(self) -> list[int]:
        return [at for at, state in self.entries if state == "waits"]

    def held(self) -> list[int]:
        return [at for at, state in self.entries if state == "held"]

    def set(self, which: int, state: str) -> None:
        next(entry for entry in self.entries if entry[0] == which)[1] = state

    def remove(self, which: int) -> None:
        self.entries = [entry for entry in self.entries if entry[0] != which]

    def add(self) -> int:
        self.entries.append([self.count, "waits"])
        self.count += 1
        return self.count - 1


STORY = st.lists(st.tuples(st.sampled_from(["hold", "end", "hand out", "add", "use"]), st.integers(0, 99)), max_size=60)


class Runs:
    """The order by `Places`. Neighbours are held as a run, which has the place of its last one."""

    def __init__(self, count: int) -> None:
        self.order = list(range(count))
        self.places = Places(lambda place: place in self.order)
        self.held: list[tuple[int, list[int]]] = []  # the place of each run, and those of it that come back

    def hold(self, at: int, size: int) -> list[int]:
        ends = self.places.with_held_behind()
        run = [self.order[at]]
        while len(run) < size and run[-1] not in ends and at + len(run) < len(self.order):
            run.append(self.order[at + len(run)])
        self.places.leave(run[-1], self.order[at - 1] if at else FRONT)
        del self.order[at : at + len(run)]
        self.held.append((run[-1], run))
        return run

    def end(self, at: int) -> list[int]:
        place, run = self.held.pop(at)
        if not run:
            self.places.forget(place)
            return []
        self.places.rename(place, run[-1])
        behind = self.places.back(run[-1])
        first = 0 if behind == FRONT else self.order.index(behind) + 1
        self.order[first:first] = run
        return run

    def use(self, which: int) -> None:
        for _, run in self.held:
            if which in run:
                run.remove(which)


def serve(story: list[tuple[str, int]], gently: bool) -> tuple[list[int], list[int], Places]:
    """The order by `Places`, the slow one, and the places left, when all holds have ended.

    `gently`: the engine hands out nothing that a held one stands before, and uses again only what is held.
    """
    slow, runs = SlowOrder(8), Runs(8)
    order = runs.order

    def end(at: int) -> None:
        for each in runs.end(at):
            slow.set(each, "waits")

    for action, which in story:
        held = slow.held()
        if action == "hold" and order:
            for each in runs.hold(which % len(order), 1 + which // len(order) % 4):
                slow.set(each, "held")
        elif action == "end" and runs.held:
            end(which % len(runs.held))
        elif action == "hand out" and order and not (gently and slow.entries[0][1] == "held"):
            slow.remove(order.pop(0))
        elif action == "add":
            order.append(slow.add())
        elif action == "use" and held and gently:
            runs.use(held[which % len(held)])
            slow.remove(held[which % len(held)])
        elif action == "use" and order and not gently:
            slow.remove(order.pop(which % len(order)))
        assert order == slow.waiting() or not gently
    while runs.held:
        end(-1 if len(story) % 2 else 0)
    return order, slow.waiting(), runs.places


@given(STORY)
@example([("hold", 1), ("hold", 1), ("use", 1)])  # the second of two that are held side by side
@example([("hold", 9), ("hold", 1), ("use", 1), ("end", 0)])  # the last of a run that others are held behind
@example([("hold", 1), ("hand out", 0), ("hold", 0), ("hold", 0)])  # 1 waited before what became the first later
def test_held_blocks_come_back_to_where_they_waited(story: list[tuple[str, int]]) -> None:
    order, slow, places = serve(story, gently=True)
    assert order == slow
    assert not len(places) and not places._last, "something is remembered for ever"


@given(STORY)
def test_nothing_is_lost_whatever_the_engine_takes_from_between(story: list[tuple[str, int]]) -> None:
    """A block that stood behind one that is gone comes back at the front: it may leave too early, never too late."""
    order, slow, places = serve(story, gently=False)
    assert sorted(order) == sorted(slow)
    assert not len(places) and not places._last
