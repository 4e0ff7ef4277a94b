"""A keeper of this process, and engines' lines to it, whose answers come late, but in their order."""

import random
import secrets
from types import SimpleNamespace
from unittest.mock import patch

from cpu_prefix_cache import NodePool
from cpu_prefix_cache.keeper.answers import check_answered
from cpu_prefix_cache.keeper.counts import counted
from cpu_prefix_cache.keeper.keeper import Keeper
from cpu_prefix_cache.keeper.protocol import NAMESPACE_BYTES, Kind, Message, check_asked
from cpu_prefix_cache.keeper.records import Records, records_bytes


class KeeperHere:
    """Keeper of so many slots. `region` is what engines have written there."""

    def __init__(self, num_slots):
        self.num_slots = num_slots
        self.region = {}
        self._records = Records(memoryview(bytearray(records_bytes(num_slots))))
        self._records.begin(num_slots, 64)
        self.keeper = None
        self._joined = 0

    def engine(self, make, **options):
        """`make` with these options, and a line to this keeper."""
        self._joined += 1

        def messenger(planner):
            self.keeper = self.keeper or Keeper(self.num_slots, self._records, planner)
            return Line(self.keeper, self._joined, self.num_slots, planner)

        taken = SimpleNamespace(messenger=messenger)
        pool = {"address": "unix:/run/kv.sock", "revision": "1"}
        with patch.object(NodePool, "taken", lambda *_: taken):
            return make(pool=pool, offload="eager", host_blocks=self.num_slots, region=self.region, **options)


class Line:
    """Messenger of engine `number`."""

    connection, is_up = 1, True

    def __init__(self, keeper, number, num_slots, planner):
        self.num_slots, self.uses, self._planner = num_slots, 0, planner
        self._keeper, self._number, self._answers = keeper, number, []
        self._random = random.Random(number)
        keeper.join(number, bytes(NAMESPACE_BYTES))

    def send(self, connection, message):
        check_asked(message)
        kind, id, numbers, keys = message
        if kind is Kind.RUN:
            self._answer(message, Kind.RAN, self._keeper.run(self._number, id, keys).numbers)
        elif kind is Kind.TAKE:
            self._answer(message, Kind.TOOK, self._keeper.take(self._number, id, keys, bool(numbers[0])).numbers)
        elif kind is Kind.COMMIT:
            self._keeper.commit(self._number, id, numbers[0], bool(numbers[1]))
        elif kind is Kind.COUNT:
            self._answer(message, Kind.COUNTED, counted(self._keeper.statistics()))
        else:
            assert kind is Kind.RELEASE
            self._keeper.release(self._number, id)

    def _answer(self, asked, kind, numbers):
        answer = Message(kind, asked.id, numbers)
        check_answered(asked, answer, self.num_slots, self._planner)
        self._answers.append(answer)

    def answers(self):
        found = []
        while self._answers and self._random.random() < 0.7:
            found.append((self.connection, self._answers.pop(0)))
        return found

    def begin_use(self, connection):
        self.uses += 1
        return True

    def end_use(self):
        self.uses -= 1

    def rename(self, revision):
        self._keeper.name(self._number, secrets.token_bytes(NAMESPACE_BYTES))

    def close(self):
        self._keeper.leave(self._number)
