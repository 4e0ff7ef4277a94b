"""An engine of engine.py in a process of its own, as a story sees it: what it has done since the story began."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

PROGRAM = Path(__file__).with_name("engine.py")
ROOT = PROGRAM.parents[3]
START_SECONDS = WAIT_SECONDS = 60.0
END_SECONDS = 60.0


class Engine:
    """Serves on the tier in `folder`. `weights`: how often they were replaced before it began."""

    def __init__(self, folder, talk, weights=0, control=""):
        talk.mkdir()
        self._talk = talk
        self._told = {"weights": weights, "story": 0, "ends": False}
        self._tell()
        environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'examples'}", "OMP_NUM_THREADS": "1"}
        environment.pop("COVERAGE_PROCESS_START", None)
        with (talk / "log").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, PROGRAM, folder, talk, control], stdout=log, stderr=log, env=environment
            )
        self.wait_for(lambda seen: seen["steps"] > 0, START_SECONDS)

    @property
    def seen(self):
        """Its last report. Raises AssertionError if it has ended."""
        while True:  # it may end while it writes
            assert self.process.poll() is None, f"the engine has ended: {self._ending()}\n{self.log[-4000:]}"
            try:
                return json.loads((self._talk / "seen").read_bytes())
            except FileNotFoundError:
                return {"steps": 0}
            except ValueError:  # it is being written
                time.sleep(0.001)

    @property
    def log(self):
        return (self._talk / "log").read_text(errors="replace")

    def wait_for(self, condition, seconds=WAIT_SECONDS):
        deadline = time.monotonic() + seconds
        while not condition(seen := self.seen):
            assert time.monotonic() < deadline, f"it has not come: {seen}\n{self.log[-4000:]}"
            time.sleep(0.01)
        return seen

    def warm_up(self):
        """Until host and tier are both in use, and both are compared."""
        self.wait_for(lambda seen: seen["tier_tokens"] > 2000 and seen["host_tokens"] > 2000 and seen["compared"] > 100)
        return self

    def reset(self):
        """Replace the weights; returns when the engine has done it."""
        self._told["weights"] += 1
        self._tell()
        return self.wait_for(lambda seen: seen["weights"] == self._told["weights"])

    @property
    def weights(self):
        return self._told["weights"]

    def begin_story(self):
        self._told["story"] += 1
        self._tell()
        return self.wait_for(lambda seen: seen.get("story") == self._told["story"])

    def goes_on(self, seconds=0.0, steps=60):
        """It takes steps and finds prefixes on the host, for so many seconds at least."""
        until = time.monotonic() + seconds
        self.grow({"steps": steps, "host_tokens": 1, "ended": 3})
        self.wait_for(lambda seen: time.monotonic() >= until)

    def goes_on_through_a_reset(self, seconds=0.0):
        self.goes_on(seconds / 2)
        self.reset()
        self.goes_on(seconds / 2)

    def uses_its_tier(self):
        """It writes to it, and loads from it."""
        self.grow({"stored": 1, "tier_tokens": 1})

    def grow(self, by):
        before = self.seen
        self.wait_for(lambda seen: all(seen[name] >= before[name] + count for name, count in by.items()))

    def end(self):
        """Orders the engine to end, and waits for it."""
        self._told["ends"] = True
        self._tell()
        assert self.process.wait(END_SECONDS) == 0, f"{self._ending()}\n{self.log[-4000:]}"

    def kill(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()

    def _tell(self):
        (self._talk / "told").write_text(json.dumps(self._told))

    def _ending(self):
        code = self.process.returncode
        return signal.Signals(-code).name if code and code < 0 else code
