"""A page of metrics over HTTP, which the thread of a keeper shows between two messages of engines.

A reader of metrics sends some lines and gets the page, whatever it has asked for; then its connection ends. The kernel
hands over only connections of which something can be read, and takes all of a page at once: so nobody is waited for.
"""

import socket
from contextlib import suppress

from cpu_prefix_cache.messages.errors import ConfigurationError

SENT_SECONDS = 30  # in which a reader has sent its request, or the kernel drops it
REQUEST_BYTES = PAGE_BYTES = 64 << 10
HEAD = "HTTP/1.0 200 OK\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\nContent-Length: {}\r\n\r\n"


def listening(address: str) -> socket.socket:
    """A listener at an address such as "0.0.0.0:9400". Raises ConfigurationError."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigurationError(f"metrics are shown at HOST:PORT, such as 127.0.0.1:9400; got {address!r}")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host.strip("[]"), int(port)), family=family)
    except (OSError, OverflowError) as error:
        raise ConfigurationError(f"no metrics can be shown at {address}: {error}") from error
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, SENT_SECONDS)
    listener.setblocking(False)
    return listener


def show(connected: socket.socket, page: str) -> None:
    """Answer whoever has connected, and end that."""
    text = page.encode()
    with connected, suppress(OSError):  # it is gone
        connected.setblocking(False)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, PAGE_BYTES)
        connected.recv(REQUEST_BYTES)
        connected.send(HEAD.format(len(text)).encode() + text)
