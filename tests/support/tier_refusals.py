"""Options of a tier that are refused, with the sentences, under every connector."""

KNOWN = "kind, path, bytes, offload, policy, model, revision, keep_others"
REFUSED = [
    (dict(kind="s3"), "unknown kind of tier 's3'; known are file, mooncake, redis, rediss, unix"),
    (dict(size=5), f"unknown key 'size' in a tier; known keys are {KNOWN}"),
    (dict(bytes="64GiB"), "bytes of a tier is a whole number of bytes, at least 1; got '64GiB'"),
    (dict(bytes=0), "bytes of a tier is a whole number of bytes, at least 1; got 0"),
    (dict(bytes=True), "bytes of a tier is a whole number of bytes, at least 1; got True"),
    (dict(bytes=1e12), "bytes of a tier is a whole number of bytes, at least 1; got 1000000000000.0"),
    (dict(path=7), "path of a tier is a text that is not empty; got 7"),
    (dict(path=""), "path of a tier is a text that is not empty; got ''"),
    (dict(offload="sometimes"), "offload of a tier is lazy or eager or None; got 'sometimes'"),
    (dict(revision=None), "revision of a tier is left out rather than null; got None"),
    (dict(keep_others=1), "keep_others of a tier is true or false; got 1"),
]
