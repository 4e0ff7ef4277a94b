"""Real vLLM servers, processes of their own, of a tiny model on the CPU."""

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path

from cpu_prefix_cache.keeper.records import MAGIC, Records
from tests.stores.servers import Server
from tests.vllm.real_engine import BLOCK

ROOT = Path(__file__).parents[2]
START_SECONDS = 300.0
PATHS = [str(ROOT / "src"), str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(PATHS), "MC_TCP_PROGRESS_TIMEOUT_SEC": "20"}
ALIKE = 1e-3  # in logprobs: answers of a server from another's KV, and from its own


class VllmServer(Server):
    """One with the model in `model`, and these options of the connector. It is started, and not waited for. `more` are
    of its command line."""

    def __init__(self, folder, model, extra, *more):
        self.model, self.extra, self.more = model, extra, more
        super().__init__(folder)

    def start(self):
        with (self.folder / f"log-{self.port}").open("ab") as log:
            self.process = subprocess.Popen(
                self.command(), stdout=log, stderr=log, cwd=self.folder, env=ENVIRONMENT, start_new_session=True
            )

    def kill(self):
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def is_up(self):
        assert self.process.poll() is None, (self.folder / f"log-{self.port}").read_text()
        try:
            return self.get("/health") is not None
        except (OSError, urllib.error.URLError):
            return False

    def command(self):
        transfer = {
            "kv_connector": "CPUPrefixCacheConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": self.extra,
        }
        size = [
            "--block-size",
            str(BLOCK),
            "--max-model-len",
            "2048",
            "--num-gpu-blocks-override",
            "100",
            "--kv-cache-memory-bytes",
            str(2**30),
        ]
        model = ["--model", str(self.model), "--skip-tokenizer-init", "--dtype", "float32", "--enforce-eager"]
        said = [*model, *size, "--port", str(self.port), "--kv-transfer-config", json.dumps(transfer)]
        return [sys.executable, "-m", "tests.vllm.patient_server", *said, *self.more]

    def get(self, path, body=None, **headers):
        data = None if body is None else json.dumps(body).encode()
        asked = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data=data, headers={"Content-Type": "application/json", **headers}
        )
        with urllib.request.urlopen(asked, timeout=60) as answer:
            return answer.read().decode()

    def logprobs(self, prompt, **headers):
        body = {"model": str(self.model), "prompt": list(prompt), "max_tokens": 4, "temperature": 0, "logprobs": 5}
        answer = json.loads(self.get("/v1/completions", {**body, "return_tokens_as_token_ids": True}, **headers))
        return answer["choices"][0]["logprobs"]["top_logprobs"]

    def metric(self, name):
        lines = (line.rpartition(" ") for line in self.get("/metrics").splitlines() if line.startswith(f"vllm:{name}"))
        return sum(float(value) for _, _, value in lines)


class NodeKeeper(Server):
    """A keeper of so many bytes, and the two files that it has: the region, and the records."""

    def __init__(self, folder, num_bytes):
        self.path, self.num_bytes = folder / "kv.sock", num_bytes
        super().__init__(folder)

    @property
    def address(self):
        return f"unix:{self.path}"

    def command(self):
        options = [f"--socket={self.path}", f"--host-bytes={self.num_bytes}", "--settle-seconds=0"]
        return [sys.executable, "-m", "cpu_prefix_cache.tools.cli", "keep", *options]

    def is_listening(self):
        return self.path.exists()

    def committed(self):
        """The slots of the chunks that engines find, the oldest first."""
        records = Records(memoryview(bytearray(self._file(is_records=True).read_bytes())))
        runs, _ = records.found(1, lambda group: 0)
        return [slot for run in runs for slot in run.slots]

    def damage(self, slot, lane=0, lanes=1):
        """One byte of a slot is another one: the exponent of the first float32 in a lane."""
        with self._file(is_records=False).open("r+b") as region:
            slot_bytes = region.seek(0, os.SEEK_END) // self._slots()
            at = slot * slot_bytes + lane * slot_bytes // lanes + 3
            (byte,) = os.pread(region.fileno(), 1, at)
            os.pwrite(region.fileno(), bytes([byte ^ 0x40]), at)

    def _slots(self):
        num_slots, _ = Records(memoryview(bytearray(self._file(is_records=True).read_bytes()))).shape
        return num_slots

    def _file(self, is_records):
        for file in Path(f"/proc/{self.process.pid}/fd").iterdir():
            if "memfd:" in os.readlink(file):
                with file.open("rb") as opened:
                    if (opened.read(len(MAGIC)) == MAGIC) is is_records:
                        return file
        raise AssertionError("the keeper has no region yet")


def difference(there, here):
    """Largest difference of the logprobs of tokens that both name; a token that only one of them names is far away."""
    return max(
        abs(each.get(token, 9.0) - other.get(token, 9.0))
        for each, other in zip(there, here, strict=True)
        for token in each
    )
