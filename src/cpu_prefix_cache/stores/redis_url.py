"""The URL of a Redis server: where it is, who we are there, and TLS. No message of this file repeats a part of the URL,
since any part may be one of a password that was not written as URLs demand.

    redis://[[USER]:PASSWORD@]HOST:PORT[/DATABASE]    rediss:// is with TLS    unix:///SOCKET

| option | |
|---|---|
| db | as in the form above, and it counts more than that |
| username, password | as in the form above |
| password_file | a file that has the password, read for each connection: so a new one is taken without a restart |
| password_env | the name of a variable of the environment that has the password |
| ssl_ca_certs, ssl_ca_path, ssl_ca_data | a file of authorities, a folder, or their PEM; otherwise the system's |
| ssl_certfile, ssl_keyfile | our certificate, and its key where that is in another file |
| ssl_cert_reqs | required, or optional, which is the same for a client, or none: any certificate is taken |
| ssl_check_hostname | true, or false: a certificate of another host is taken |
| ssl_min_version | TLSv1_2, or TLSv1_3 |

Other options that redis-py takes are ignored, with one warning, where they are of its connections and answers
(`IGNORED`), and refused where they change TLS (`TLS_ELSEWHERE`).
"""

import logging
import os
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from cpu_prefix_cache.messages.errors import ConfigurationError

logger = logging.getLogger(__name__)

PORT, HOST = 6379, "localhost"
PASSWORD_BYTES = 4096
LOGIN = ("db", "username", "password", "password_file", "password_env")
TLS = (
    "ssl_ca_certs",
    "ssl_ca_path",
    "ssl_ca_data",
    "ssl_certfile",
    "ssl_keyfile",
    "ssl_cert_reqs",
    "ssl_check_hostname",
    "ssl_min_version",
)
TLS_ELSEWHERE = (
    "ssl_ciphers",
    "ssl_password",
    "ssl_include_verify_flags",
    "ssl_exclude_verify_flags",
    "ssl_validate_ocsp",
    "ssl_validate_ocsp_stapled",
    "ssl_ocsp_context",
    "ssl_ocsp_expected_cert",
)
IGNORED = (
    "protocol",
    "client_name",
    "lib_name",
    "lib_version",
    "encoding",
    "encoding_errors",
    "decode_responses",
    "socket_timeout",
    "socket_connect_timeout",
    "socket_keepalive",
    "socket_read_size",
    "retry_on_timeout",
    "retry_on_error",
    "max_connections",
    "timeout",
    "health_check_interval",
)
VERSIONS = {"TLSv1_2": ssl.TLSVersion.TLSv1_2, "TLSv1_3": ssl.TLSVersion.TLSv1_3}
ENCODED = "in a user or a password, / is written as %2F, ? as %3F, # as %23, @ as %40 and % as %25"
ELSEWHERE = "or give the password elsewhere: ?password_file=PATH or ?password_env=NAME"


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """`path` is that of a socket of this machine; if it is empty, the server is at `host` and `port`."""

    host: str
    port: int
    path: str
    database: int
    user: str
    password: Callable[[], str] = field(repr=False)
    tls: ssl.SSLContext | None

    @property
    def name(self) -> str:
        return self.path or (f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}")


def parse_redis_url(url: str) -> RedisAddress:
    """Raises ConfigurationError."""
    parts = _split(url)
    known = LOGIN + (TLS if parts.scheme == "rediss" else ())
    options = _options(parts.query, known)
    path = parts.path if parts.scheme == "unix" else ""
    if parts.scheme == "unix" and (not path.strip("/") or parts.hostname):
        raise _wrong("unix:// is followed by a path that begins with /")
    database = options.get("db", "" if path else parts.path.strip("/")) or "0"
    if not database.isdecimal() or len(database) > 9:
        raise _wrong("the database is a number")
    try:
        port, _ = parts.port, (parts.hostname or HOST).encode("idna")
    except ValueError:
        raise _wrong(f"the host is no name, or the port no number up to 65535; {ENCODED}; {ELSEWHERE}") from None
    return RedisAddress(
        parts.hostname or HOST,
        PORT if port is None else port,
        unquote(path),
        int(database),
        _one(options, "username", unquote(parts.username or "")),
        _password(options, unquote(parts.password or "")),
        _context(options) if parts.scheme == "rediss" else None,
    )


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        is_clean = not any(each <= " " for each in url) and "@" not in parts.path + parts.query + parts.fragment
    except ValueError:
        is_clean = False
    if not is_clean or parts.fragment or url.endswith("#"):
        raise _wrong(f"something in it stands where it may not: {ENCODED}; {ELSEWHERE}")
    if parts.scheme not in ("redis", "rediss", "unix"):
        raise _wrong("it begins otherwise")
    return parts


def _options(query: str, known: tuple[str, ...]) -> dict[str, str]:
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError:
        pairs = [("", "")]
    options = dict(pairs)
    if refused := [name for name in (*TLS, *TLS_ELSEWHERE) if name in options and name not in known]:
        where = "for rediss://" if refused[0] in TLS else "not carried out here"
        raise _wrong(f"the option {refused[0]} changes TLS, and is {where}; leave it out")
    if len(options) < len(pairs) or not options.keys() <= {*known, *IGNORED}:
        raise _wrong(f"its options are {', '.join(known)}, each once and with a value (NAME=VALUE&NAME=VALUE)")
    if ignored := [name for name in IGNORED if name in options]:
        _say_ignored(", ".join(ignored))
    return options


@cache
def _say_ignored(names: str) -> None:
    """Once in a process: a store that does not answer is tried again and again."""
    logger.warning(
        "options of the store's URL that mean nothing here are ignored: %s. Each call has a time of its own, and makes "
        "the connections that it needs",
        names,
    )


def _one(options: Mapping[str, str], name: str, said: str) -> str:
    """Value that the URL has in its form, or as an option."""
    if said and name in options:
        raise _wrong(f"it has the option {name}, and says the same in its form: leave one out")
    return said or options.get(name, "")


def _password(options: Mapping[str, str], said: str) -> Callable[[], str]:
    """Read once, so that what is missing is seen at once."""
    in_url = _one(options, "password", said)
    file, variable = options.get("password_file"), options.get("password_env")
    if sum(map(bool, (in_url, file, variable))) > 1:
        raise _wrong("it gives more than one password: by itself, password_file or password_env")
    if variable is not None:
        if variable not in os.environ:
            raise ConfigurationError("the variable of the environment that password_env names is not set")
        return lambda: os.environ.get(variable, "")
    if file is not None:
        path = Path(file)
        try:
            _read_password(path)
        except (OSError, ValueError) as failed:
            raise ConfigurationError(f"the password_file of the store cannot be used: {failed}") from failed
        return lambda: _read_password(path)
    return lambda: in_url


def _read_password(path: Path) -> str:
    """Raises OSError, or ValueError for what is no text."""
    with path.open("rb") as file:
        text = file.read(PASSWORD_BYTES + 1)
    if len(text) > PASSWORD_BYTES:
        raise OSError(f"{path} has more than {PASSWORD_BYTES} bytes")
    try:
        return text.decode().rstrip("\r\n")
    except UnicodeDecodeError:
        raise OSError(f"{path} is no text") from None


def _context(options: Mapping[str, str]) -> ssl.SSLContext:
    requires, checks = options.get("ssl_cert_reqs", "required"), options.get("ssl_check_hostname", "true").lower()
    if requires not in ("required", "optional", "none") or checks not in ("true", "false"):
        raise _wrong("ssl_cert_reqs is required, optional or none, and ssl_check_hostname true or false")
    least, authorities = options.get("ssl_min_version"), options.get("ssl_ca_data")
    if least is not None and least not in VERSIONS:
        raise _wrong(f"ssl_min_version is {' or '.join(VERSIONS)}")
    if authorities is not None and not authorities.isascii():
        raise _wrong("ssl_ca_data is the PEM of certificates")
    certificate, key = options.get("ssl_certfile"), options.get("ssl_keyfile")
    try:
        context = ssl.create_default_context(
            cafile=options.get("ssl_ca_certs"), capath=options.get("ssl_ca_path"), cadata=authorities
        )
        if certificate:
            context.load_cert_chain(certificate, key)
    except OSError as failed:  # of which SSLError is one
        raise ConfigurationError(f"what {', '.join(TLS[:5])} of the store name cannot be used: {failed}") from failed
    if least is not None:  # otherwise the system's
        context.minimum_version = VERSIONS[least]
    context.check_hostname = checks == "true" and requires != "none"
    if requires == "none":
        context.verify_mode = ssl.CERT_NONE
    return context


def _wrong(why: str) -> ConfigurationError:
    return ConfigurationError(
        "a store is redis://[[USER]:PASSWORD@]HOST:PORT[/DATABASE], rediss:// with TLS, or unix:///SOCKET; what was "
        f"given is none, and is not repeated here for its password: {why}"
    )
