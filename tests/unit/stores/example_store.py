"""A store of one's own: each value a file in a folder that several machines mount (NFS, Lustre). It does not evict."""

import os
import uuid
from hashlib import sha256
from pathlib import Path

from cpu_prefix_cache import ConfigurationError
from cpu_prefix_cache.tier import Got, KeyedStore


class FolderStore(KeyedStore):
    """`folder:///mnt/kv`. A mount that hangs cannot be given up, so calls are as long as it takes."""

    def __init__(self, url):
        self._folder, self._closed = Path(url.removeprefix("folder://")), False
        if not self._folder.is_dir():
            raise ConfigurationError(f"a store of files is folder:///PATH of a folder that exists; got {url!r}")

    def register(self, memory):
        pass

    def exists(self, keys, timeout):
        return [self._file(key).exists() for key in keys]

    def get_into(self, keys, buffers, timeout):
        return [self._get(self._file(key), each) for key, each in zip(keys, buffers, strict=True)]

    def put_from(self, keys, buffers, timeout):
        return [self._put(self._file(key), each) for key, each in zip(keys, buffers, strict=True)]

    def delete(self, keys, timeout):
        for key in keys:
            self._file(key).unlink(missing_ok=True)

    def close(self):
        self._closed = True

    def _file(self, key):
        if self._closed:
            raise ConnectionError("the store is closed")
        return self._folder / sha256(key.encode()).hexdigest()  # file systems may fold case

    def _get(self, file, buffers):
        try:
            with file.open("rb", buffering=0) as opened:
                size = sum(map(len, buffers))
                is_right = os.fstat(opened.fileno()).st_size == size == os.preadv(opened.fileno(), buffers, 0)
                return Got.READ if is_right else Got.OTHER_SIZE
        except FileNotFoundError:
            return Got.MISSING

    def _put(self, file, buffers):
        new = self._folder / f"new-{uuid.uuid4().hex}"
        with new.open("wb") as opened:
            opened.writelines(buffers)
        new.replace(file)  # readers see the old value or the new one, whole
        return True
