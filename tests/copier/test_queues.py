"""Two queues as one lane: both are drained, and both are waited for, whatever becomes of one."""

import pytest

from cpu_prefix_cache.copier.queues import Lane


class Queue:
    def __init__(self, error=None):
        self.error, self.drained, self.passed_marks = error, False, False

    def drain(self):
        self.drained = True
        if self.error is not None:
            raise self.error

    def mark(self):
        return self

    def passed(self):
        return self.passed_marks


@pytest.mark.parametrize("broken", [0, 1])
def test_a_queue_that_cannot_be_drained_does_not_keep_the_other_from_it(broken):
    queues = [Queue(RuntimeError("gone") if at == broken else None) for at in range(2)]
    with pytest.raises(RuntimeError, match="gone"):
        Lane(*queues).drain()
    assert all(queue.drained for queue in queues)


def test_the_mark_of_a_lane_is_passed_when_both_queues_have_come_there():
    kernels, copies = Queue(), Queue()
    mark = Lane(kernels, copies).mark()
    for kernels.passed_marks, copies.passed_marks in ((False, False), (True, False), (False, True), (True, True)):
        assert mark.passed() is (kernels.passed_marks and copies.passed_marks)
