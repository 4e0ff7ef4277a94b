"""Fields of a URL of a Redis server; no sentence about a wrong one has a part of its password."""

import ssl
import traceback
from urllib.parse import quote

import pytest

from connector.tier.options import TierOption
from cpu_prefix_cache import ConfigurationError, SharedTier
from cpu_prefix_cache.stores.dialect import parse_tier
from cpu_prefix_cache.stores.opening import check_kind, open_store
from cpu_prefix_cache.stores.redis_url import _say_ignored, parse_redis_url

CERTIFICATE = """
-----BEGIN CERTIFICATE-----
MIIBeDCCAR2gAwIBAgIUfulVp2Z6H8se0ShwXYl1rkZYvEowCgYIKoZIzj0EAwIw
EDEOMAwGA1UEAwwFY2FjaGUwIBcNMjYxMTI2MDkzMDIwWhgPMjEyNjExMDIwOTMw
MjBaMBAxDjAMBgNVBAMMBWNhY2hlMFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAE
DHYEhiay5cygEvXorREA/KTKvr6QHtQHUovGlo/XCJP4joyf2eqbKZ0o83PEKf1+
//yI7QPFev3xkNLwUiRjRaNTMFEwHQYDVR0OBBYEFN5Kq1L6Gxau/SW8p6klUOl0
s9BwMB8GA1UdIwQYMBaAFN5Kq1L6Gxau/SW8p6klUOl0s9BwMA8GA1UdEwEB/wQF
MAMBAf8wCgYIKoZIzj0EAwIDSQAwRgIhAIsHw25nfJQF5N757ZlIcZodovhl3g2a
ADPuxHXIRp8OAiEAwa+s3bSJWH4knbzO/g8nzNZQ318Y+g7dX8o/Xpq4tow=
-----END CERTIFICATE-----
"""  # of an authority, whose key nobody has
SECRET = "hun/ter#2?x@y%z:w"  # which URLs write hun%2Fter%232%3Fx%40y%25z%3Aw


def told(act, *arguments):
    """The error, as a log has it with all that it was raised from."""
    with pytest.raises(ConfigurationError) as raised:
        act(*arguments)
    return "".join(traceback.format_exception(raised.value, limit=0))


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://cache", ("cache", 6379, "", 0, "", "")),
        ("redis://:pw@cache:1234/5", ("cache", 1234, "", 5, "", "pw")),
        ("redis://me:hun%2Fter%232%3Fx%40y%25z%3Aw@cache", ("cache", 6379, "", 0, "me", SECRET)),
        ("redis://me:a@b@[::1]:7?db=3", ("::1", 7, "", 3, "me", "a@b")),
        ("redis://cache?username=me&password=hun%2Fter%232%3Fx%40y%25z%3Aw", ("cache", 6379, "", 0, "me", SECRET)),
        ("redis://cache/0?db=1", ("cache", 6379, "", 1, "", "")),
        ("redis://:0", ("localhost", 0, "", 0, "", "")),
        ("unix:///run/re%20dis.sock?db=2&password=pw", ("localhost", 6379, "/run/re dis.sock", 2, "", "pw")),
        ("unix://me:pw@/run/redis.sock", ("localhost", 6379, "/run/redis.sock", 0, "me", "pw")),
    ],
)
def test_fields_of_a_url(url, expected):
    address = parse_redis_url(url)
    assert (address.host, address.port, address.path, address.database, address.user, address.password()) == expected
    assert address.tls is None and "pw" not in repr(address)


def test_tls_checks_certificates_and_names_unless_switched_off():
    plain = parse_redis_url("rediss://cache").tls
    assert plain.verify_mode is ssl.CERT_REQUIRED and plain.check_hostname
    other_name = parse_redis_url("rediss://cache?ssl_check_hostname=false").tls
    assert other_name.verify_mode is ssl.CERT_REQUIRED and not other_name.check_hostname
    optional = parse_redis_url("rediss://cache?ssl_cert_reqs=optional").tls
    assert optional.verify_mode is ssl.CERT_REQUIRED and optional.check_hostname, "the same, for a client"
    newest = parse_redis_url("rediss://cache?ssl_min_version=TLSv1_3").tls
    assert newest.minimum_version is ssl.TLSVersion.TLSv1_3
    anybody = parse_redis_url("rediss://cache?ssl_cert_reqs=none").tls
    assert anybody.verify_mode is ssl.CERT_NONE


@pytest.mark.parametrize("option", ["ssl_cert_reqs=perhaps", "ssl_check_hostname=perhaps"])
def test_a_switch_of_tls_that_is_none_is_refused(option):
    assert "required, optional or none" in told(parse_redis_url, f"rediss://cache?{option}")


@pytest.mark.parametrize(
    ("url", "name"), [("redis://cache:7", "cache:7"), ("redis://[::1]:7", "[::1]:7"), ("unix:///run/r", "/run/r")]
)
def test_the_name_of_a_server(url, name):
    assert parse_redis_url(url).name == name


@pytest.mark.parametrize(
    "rest",
    [
        ":hun/ter2@cache",
        ":hun#ter2@cache",
        ":hun?ter2@cache",
        ":hun?ter2=hun@cache",
        ":hun[ter2@cache",
        ":hunter2@cache:hunter2",
        ":hun ter2@cache",
        ":hun\nter2@cache",
        "cache?hunter2",
        "cache?hunter2=hunter2",
        "cache?db=hunter2",
        "cache?db=1&db=1&password=hunter2",
        ":hunter2@cache?password=hunter2",
        ":hunter2@cache?password_env=HUNTER2",
        ":hunter2@cache#",
        ":hunter2@a..b",
    ],
)
@pytest.mark.parametrize("scheme", ["redis", "rediss"])
def test_no_sentence_about_a_wrong_url_has_a_part_of_the_password(scheme, rest):
    url = f"{scheme}://{rest}"
    said = told(open_store, url) + SharedTier(url, model="m", revision="1").address
    assert "a store is redis://" in said and not any(part in said for part in ("hun", "ter2", "HUNTER2"))


@pytest.mark.parametrize(
    ("url", "shown"),
    [("redis://me:pw@cache:7000/3", "redis://cache:7000/3"), ("redis://me:p/w@cache:7000", "redis://")],
)
def test_a_tier_is_named_by_as_much_of_its_url_as_has_no_password(url, shown):
    assert str(SharedTier(url, model="m", revision="1")) == f"a tier in {shown}"


@pytest.mark.parametrize(
    ("act", "argument"),
    [
        (open_store, ":hunter2@cache:6379"),
        (open_store, "hunter2"),
        (SharedTier, ":hunter2@cache:6379"),
        (lambda url: check_kind("redis", url), ":hunter2@cache:6379"),
        (lambda url: check_kind("redis", url), "hunter2"),
        (parse_tier, "redis:/:hunter2@cache:6379"),
        (parse_tier, "redis//:hunter2@cache:6379"),
        (parse_tier, "redis//hunter2@cache:6379"),
        (parse_tier, ":hunter2@cache:6379"),
        (parse_tier, "hunter2"),
        (parse_tier, "hunter"),
        (TierOption.of, {"kind": "redis://:hunter2@cache"}),
        (TierOption.of, ["redis://:hunter2@cache"]),
        (TierOption.of, ":hunter2@cache"),
        (TierOption.of, {"kind": "redis", "url": ["redis://:hunter2@cache"]}),
    ],
)
def test_no_sentence_about_what_is_no_url_has_a_part_of_the_password(act, argument):
    assert "hunter" not in told(act, argument)


def test_no_tier_that_is_shown_has_a_part_of_the_password():
    option = TierOption.of("redis://:hunter2@cache:6379")
    assert "hunter" not in f"{option} {option!r} {option.tier} {option.tier!r}" and "cache:6379" in str(option.tier)


@pytest.mark.parametrize("url", ["redis://:hun/ter2@cache", "redis://:hun?ter2@cache", "redis://:hun#ter2@cache"])
def test_a_password_with_reserved_characters_is_refused_with_a_remedy(url):
    said = told(parse_redis_url, url)
    assert "%2F" in said and "%3F" in said and "%23" in said and "password_file=PATH" in said


def test_unknown_options_are_refused_with_those_that_are_known():
    assert "ssl" not in (said := told(parse_redis_url, "redis://cache?sockettimeout=3")) and "password_file" in said
    assert "ssl_ca_certs" in told(parse_redis_url, "rediss://cache?sockettimeout=3")
    assert "ssl_min_version is TLSv1_2 or TLSv1_3" in told(parse_redis_url, "rediss://cache?ssl_min_version=TLSv1")


@pytest.mark.parametrize("scheme", ["redis", "rediss"])
def test_options_of_connections_and_answers_are_ignored_with_one_warning(scheme, caplog):
    _say_ignored.cache_clear()
    url = f"{scheme}://cache?protocol=3&client_name=engine&socket_timeout=3&max_connections=9&health_check_interval=5"
    for _ in range(3):
        assert parse_redis_url(url).host == "cache"
    (line,) = (record.getMessage() for record in caplog.records)
    assert "protocol, client_name, socket_timeout, max_connections, health_check_interval" in line
    assert "engine" not in line


@pytest.mark.parametrize("name", ["ssl_ciphers", "ssl_password", "ssl_validate_ocsp"])
@pytest.mark.parametrize("scheme", ["redis", "rediss"])
def test_unsupported_options_that_change_tls_are_refused_by_name(scheme, name):
    said = told(parse_redis_url, f"{scheme}://cache?{name}=hunter2&protocol=3")
    assert f"the option {name} changes TLS" in said and "hunter2" not in said


def test_options_of_tls_are_refused_by_name_without_it():
    assert "ssl_ca_certs changes TLS, and is for rediss://" in told(parse_redis_url, "redis://cache?ssl_ca_certs=x")


def test_authorities_may_be_given_as_text():
    text = quote(CERTIFICATE)
    (authority,) = parse_redis_url(f"rediss://cache?ssl_ca_data={text}").tls.get_ca_certs()
    assert authority["subject"] == ((("commonName", "cache"),),)
    for wrong in ("hunter2", "%C3%A9"):
        said = told(parse_redis_url, f"rediss://cache?ssl_ca_data={wrong}")
        assert "ssl_ca_data" in said and "hunter" not in said


def test_a_password_in_a_file_is_read_for_each_connection(tmp_path):
    file = tmp_path / "password"
    file.write_text(SECRET + "\n")
    address = parse_redis_url(f"redis://me@cache?password_file={file}")
    assert (address.user, address.password()) == ("me", SECRET)
    file.write_text("a new one")
    assert address.password() == "a new one"
    file.unlink()
    with pytest.raises(FileNotFoundError):
        address.password()


@pytest.mark.parametrize("content", [None, b"x" * 5000, b"\xff\xfe"])
def test_a_file_that_has_no_password_is_refused(tmp_path, content):
    file = tmp_path / "password"
    if content is not None:
        file.write_bytes(content)
    assert "password_file" in told(parse_redis_url, f"redis://cache?password_file={file}")


def test_a_password_in_the_environment(monkeypatch):
    monkeypatch.setenv("CACHE_PASSWORD", SECRET)
    assert parse_redis_url("redis://cache?password_env=CACHE_PASSWORD").password() == SECRET
    monkeypatch.delenv("CACHE_PASSWORD")
    assert "not set" in told(parse_redis_url, "redis://cache?password_env=CACHE_PASSWORD")


def test_files_of_certificates_that_cannot_be_read_are_refused(tmp_path):
    (tmp_path / "no-certificate").write_text("nothing")
    for name in ("missing", "no-certificate"):
        assert "ssl_ca_certs" in told(parse_redis_url, f"rediss://cache?ssl_ca_certs={tmp_path / name}")
        assert "ssl_certfile" in told(parse_redis_url, f"rediss://cache?ssl_certfile={tmp_path / name}")
