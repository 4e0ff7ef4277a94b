"""A small engine over the pool of a keeper, and the keeper in a process of its own."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

from cpu_prefix_cache import NodePool
from cpu_prefix_cache.keeper.protocol import Kind, Message
from tests.support.host_engine import CHUNK_BYTES, PATIENCE, HostEngine
from tests.support.threads import pause

ROOT = Path(__file__).parents[3]


class KeeperProcess:
    """`cpu-prefix-cache keep`, which can be killed and started again."""

    program = ("-m", "cpu_prefix_cache.tools.cli")
    packages = ()  # folders of installed ones

    def __init__(self, folder, slots=32, block_bytes=CHUNK_BYTES, **options):
        self.path = str(folder / "kv.sock")
        self.host_bytes, self.options = slots * block_bytes, {"settle-seconds": 0, "adopt-seconds": 5, **options}
        self.process = None
        self.log = folder / "keeper.log"
        self.start()

    def start(self):
        options = [f"--{name}={value}" for name, value in self.options.items()]
        command = [sys.executable, *self.program, "keep", f"--socket={self.path}"]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*command, f"--host-bytes={self.host_bytes}", *options],
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [ROOT / "src", ROOT, *self.packages]))},
            )
        self.first_line = self.process.stdout.readline().decode()
        assert self.first_line, f"the keeper did not start: {self.log.read_text()}"

    def kill(self, sign=signal.SIGKILL):
        self.process.send_signal(sign)
        self.process.wait()
        self.process.stdout.close()

    @property
    def address(self):
        return f"unix:{self.path}"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGCONT)
            self.kill()


def settle(cache):
    """Wait until the keeper has carried out all that was sent to it: it answers in order. Or until it is gone."""
    messenger = cache._messenger
    message, answered = Message(Kind.COUNT, next(cache._ids)), set()
    with mock.patch.object(cache._pool_counts, "answered", lambda each: answered.add(each.id)):
        messenger.send(messenger.connection, message)
        until = time.monotonic() + PATIENCE
        while messenger.is_up and message.id not in answered:
            cache.passed(time.monotonic())
            pause(until, "the keeper does not answer")


class PoolEngine(HostEngine):
    def __init__(self, address, device_blocks=16, model="model", revision="1", weights=0, wrap_copier=None):
        pool = NodePool(address, model=model, revision=revision)
        super().__init__(device_blocks, weights, pool=pool, wrap_copier=wrap_copier)

    def stores(self, prompt):
        """Serve a prompt, and forget it on the device."""
        self.serves(prompt)
        self.rests()
        self.forgets()
        self.settles()

    def settles(self):
        settle(self.host.cache)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with contextlib.suppress(RuntimeError):
            self.host.close()
