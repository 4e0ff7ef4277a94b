"""A client of a MemoryStore that plays the server: each is closed on its own."""

from cpu_prefix_cache.stores.keyed_store import KeyedStore


class Client(KeyedStore):
    def __init__(self, server):
        self._server, self._closed = server, False

    @property
    def server(self):
        if self._closed:
            raise ConnectionError("the store is closed")
        return self._server

    def register(self, memory):
        pass

    def exists(self, keys, timeout):
        return self.server.exists(keys, timeout)

    def get_into(self, keys, buffers, timeout):
        return self.server.get_into(keys, buffers, timeout)

    def put_from(self, keys, buffers, timeout):
        return self.server.put_from(keys, buffers, timeout)

    def delete(self, keys, timeout):
        self.server.delete(keys, timeout)

    def close(self):
        self._closed = True
