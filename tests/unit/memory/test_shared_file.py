"""A file that one process makes and hands to others of the same user, with real processes, some of other users."""

import os
import socket
import subprocess
import sys
import threading

import pytest

from cpu_prefix_cache import ConfigurationError
from cpu_prefix_cache.memory import shared_file
from cpu_prefix_cache.memory.shared_file import OfferedFile, make, take_file

NOBODY = 65534
SECONDS = 60.0
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")

TAKER = """
import os, sys
from cpu_prefix_cache.memory.shared_file import take_file
if sys.argv[2] != "-":
    os.setuid(int(sys.argv[2]))
file = take_file(sys.argv[1])
print(os.pread(file, 6, 0).decode(), flush=True)
os.pwrite(file, b"answer", 0)
"""


@pytest.fixture
def file():
    file = make(1 << 16)
    os.pwrite(file, b"secret", 0)
    yield file
    os.close(file)


@pytest.fixture
def offer(file):
    offer = OfferedFile(file)
    yield offer
    offer.close()


def taker(address, user="-"):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", TAKER, address, str(user)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_other_processes_get_the_file_itself(file, offer):
    others = [taker(offer.address) for _ in range(2)]
    offer.give(2)
    for each in others:
        said, _ = each.communicate(timeout=SECONDS)
        assert each.returncode == 0 and said in ("secret\n", "answer\n")
    assert os.pread(file, 6, 0) == b"answer"


def test_nothing_is_left_where_others_could_find_it(file, offer):
    assert os.readlink(f"/proc/self/fd/{file}").startswith("/memfd:")
    assert offer.address not in "".join(os.listdir("/dev/shm") + os.listdir("/tmp"))
    assert len({OfferedFile(file).address for _ in range(10)}) == 10


@needs_root
def test_another_user_gets_nothing_and_is_not_counted(offer):
    foreign, ours = taker(offer.address, NOBODY), None
    try:
        _, error = foreign.communicate(timeout=SECONDS)  # it sees who offers, and goes
        assert foreign.returncode == 1 and "another user" in error
        ours = taker(offer.address)
        offer.give(1)
        said, _ = ours.communicate(timeout=SECONDS)
        assert said == "secret\n"
    finally:
        for each in filter(None, (foreign, ours)):
            each.kill()
            each.wait()


@needs_root
def test_one_of_another_user_who_does_not_look_gets_nothing(offer):
    program = (
        "import os, socket, sys\n"
        f"os.setuid({NOBODY})\n"
        "came = socket.socket(socket.AF_UNIX); came.connect('\\0' + sys.argv[1]); print('came', flush=True)\n"
        "sys.exit(len(socket.recv_fds(came, 1, 1)[1]))\n"
    )
    foreign = subprocess.Popen([sys.executable, "-c", program, offer.address], stdout=subprocess.PIPE, text=True)
    try:
        assert foreign.stdout.readline() == "came\n"
        with pytest.raises(ConfigurationError, match="1 of 1 ranks did not come"):
            offer.give(1, seconds=0.2)
        assert foreign.wait(SECONDS) == 0
    finally:
        foreign.kill()
        foreign.communicate()


@pytest.fixture
def offered_by():
    """A socket at which anybody may listen."""
    name = f"cpu-prefix-cache-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"\0{name}")
        listening.listen()
        yield name, listening


def test_a_file_that_another_user_offers_is_not_taken(offered_by, monkeypatch):
    monkeypatch.setattr(shared_file, "user_of", lambda _: NOBODY)
    with pytest.raises(ConfigurationError, match="another user"):
        take_file(offered_by[0])


def test_a_maker_that_ends_before_it_gives_is_a_sentence(offered_by):
    name, listening = offered_by
    ends = threading.Thread(target=lambda: listening.accept()[0].close())
    ends.start()
    with pytest.raises(ConfigurationError, match="the first rank ended"):
        take_file(name)
    ends.join()


def test_a_maker_that_does_not_answer_or_is_not_there_is_a_sentence(offered_by):
    with pytest.raises(ConfigurationError, match="one network namespace"):
        take_file(offered_by[0], seconds=0.1)
    with pytest.raises(ConfigurationError, match="one network namespace"):
        take_file("cpu-prefix-cache-nowhere")


def test_ranks_that_do_not_come_are_counted(file):
    offer = OfferedFile(file)
    with pytest.raises(ConfigurationError, match="2 of 2 ranks did not come"):
        offer.give(2, seconds=0.05)
    offer.close()
