"""The tree of `examples/radix_engine` as a trial for `check_device`, with the device of its glue."""

from radix_engine import engine, host

Host = host.Host


class RadixTrial:
    """`device` is a subclass of Host."""

    def __init__(self, num_pages, chunk_blocks, page_tokens=1, device=Host):
        self.engine = engine.Engine(num_pages, page_tokens)
        self.cache = self.engine.cache
        self.page_tokens = page_tokens
        self.chunk_blocks = chunk_blocks
        self.device = device(self.engine, chunk_blocks * page_tokens, host_bytes=1 << 20, max_model_len=1024)
        self.engine.host = self

    def take(self, keys, cached, tokens):
        of_pages = [token for token in tokens for _ in range(self.page_tokens)]
        request = engine.Request(None, of_pages, 0)
        request.keys = keys
        found = cached * self.chunk_blocks
        request.node, request.pages = self.cache.match(of_pages[: found * self.page_tokens])
        self.cache.lock(request.node, +1)
        request.kept = found
        if len(tokens) - found > self.cache.room:
            self.engine.drop(request)
            return None
        request.pages += self.cache.allocate(len(tokens) - found)
        return request

    def blocks(self, request):
        return [request.pages[at : at + self.chunk_blocks] for at in range(0, len(request.pages), self.chunk_blocks)]

    def computed(self, request, chunks):
        request.length = chunks * self.chunk_blocks * self.page_tokens
        self.engine.keep(request)

    def kept(self, request):
        self.device.keyed(request.keys, request.pages[: request.kept])

    def free(self, request):
        self.engine.drop(request)
