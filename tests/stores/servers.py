"""Servers that a test starts on a free port, freezes, thaws, kills and starts again on the same port."""

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.support.threads import wait_until

START_SECONDS = 30.0


class Server:
    """A process that listens at `port`."""

    def __init__(self, folder):
        self.folder = folder
        self.port = free_port()
        self.process = None
        self.start()

    def command(self):
        raise NotImplementedError

    def start(self):
        with (self.folder / f"log-{self.port}").open("ab") as log:
            self.process = subprocess.Popen(self.command(), stdout=log, stderr=log, cwd=self.folder, env=environment())
        wait_until(self.is_ready)

    def is_ready(self):
        assert self.process.poll() is None, (self.folder / f"log-{self.port}").read_text()
        return self.is_listening()

    def is_listening(self):
        try:
            socket.create_connection(("127.0.0.1", self.port), 1.0).close()
        except OSError:
            return False
        return True

    def freeze(self):
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self):
        self.process.send_signal(signal.SIGCONT)

    def kill(self):
        self.process.kill()
        self.process.wait()

    def restart(self):
        self.kill()
        self.start()


class RedisServer(Server):
    def __init__(self, folder, *options):
        self.options = options
        super().__init__(folder)

    def command(self):
        return ["redis-server", "--save", "", "--bind", "127.0.0.1", *self.ports(), *self.options]

    def ports(self):
        return ["--port", str(self.port)]

    def ask(self, *words):
        """By hand, as the user who may do all."""
        asked = subprocess.run(["redis-cli", "-p", str(self.port), *words], capture_output=True, text=True, check=True)
        return asked.stdout.strip()

    def url(self, login="", scheme="redis", query=""):
        return f"{scheme}://{login}127.0.0.1:{self.port}{query}"


class TlsRedisServer(RedisServer):
    """Its certificate, made for the test, is its own authority."""

    def command(self):
        self.certificate = self.folder / "certificate.pem"
        if not self.certificate.exists():
            make_certificate(self.folder / "key.pem", self.certificate)
        return super().command()

    def ports(self):
        files = ["--tls-cert-file", str(self.certificate), "--tls-key-file", str(self.folder / "key.pem")]
        return ["--port", "0", "--tls-port", str(self.port), "--tls-auth-clients", "no", *files]


class MooncakeMaster(Server):
    def command(self):
        master = Path(importlib.util.find_spec("mooncake").origin).with_name("mooncake_master")
        ports = [f"--rpc_port={self.port}", f"--metrics_port={free_port()}"]
        return [str(master), "--rpc_address=127.0.0.1", *ports, "--enable_metric_reporting=false"]

    def url(self, **options):
        return f"mooncake://127.0.0.1:{self.port}?" + "&".join(f"{name}={value}" for name, value in options.items())


class MooncakeNode(Server):
    """Another process of the cluster, which gives it memory."""

    def __init__(self, folder, url):
        self.url = url
        super().__init__(folder)

    def command(self):
        return [
            sys.executable,
            str(Path(__file__).with_name("node.py")),
            self.url,
            str(self.folder / f"ready-{self.port}"),
        ]

    def is_listening(self):
        return (self.folder / f"ready-{self.port}").exists()


def environment():
    """Environment of programs that import from where we do."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


@contextmanager
def starting(folder):
    """Starts servers, by kind and options, which end with it."""
    with ExitStack() as servers:

        def begin(kind, *options):
            server = kind(folder, *options)
            servers.callback(server.kill)
            return server

        yield begin


def free_port():
    with socket.socket() as asked:
        asked.bind(("127.0.0.1", 0))
        return asked.getsockname()[1]


def make_certificate(key, certificate):
    subprocess.run(
        [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "rsa:2048",
            "-nodes",
            "-days",
            "2",
            "-subj",
            "/CN=localhost",
            "-addext",
            "subjectAltName=IP:127.0.0.1",
            "-keyout",
            str(key),
            "-out",
            str(certificate),
        ],
        check=True,
        capture_output=True,
    )


def missing():
    """Servers not installed here: name -> why its tests are skipped."""
    lacks = {}
    if shutil.which("redis-server") is None or shutil.which("redis-cli") is None:
        lacks["redis"] = "redis-server is not installed (apt install redis-server)"
    if "redis" in lacks or shutil.which("openssl") is None:
        lacks["tls"] = lacks.get("redis", "openssl is not installed (apt install openssl)")
    try:
        import mooncake.store  # noqa: F401
    except ImportError as error:
        lacks["mooncake"] = (
            f"Mooncake is not installed ({error}; pip install '.[mooncake]', "
            "apt install libibverbs1 librdmacm1 libnl-3-200 libnl-route-3-200)"
        )
    return lacks
