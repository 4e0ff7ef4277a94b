"""The radix engine with a host cache: calls of a RadixDevice by its tree, and of a HostCache by its scheduler."""

from cpu_prefix_cache import ChainHasher, HostCache, Miss, Pending, Prefix, RadixDevice, keys_and_values

CHUNK_TOKENS = 16


class Pages(RadixDevice):
    def __init__(self, cache, chunk_tokens=CHUNK_TOKENS):
        super().__init__(cache.num_pages, chunk_tokens // cache.page_tokens, hands_out_first=True)
        self.cache = cache

    @property
    def num_waiting(self):
        return len(self.cache.free_pages) + self.cache.evictable

    @property
    def num_promised(self):
        return self.cache.promised

    def free_pages(self):
        return self.cache.free_pages

    def free(self, pages):
        self.cache.free(pages)

    def parent(self, node):
        return node.parent

    def pages(self, node):
        return node.pages

    def last_use(self, node):
        return node.last_use

    def locks(self, node):
        return node.locks

    def lock(self, node, by):
        self.cache.lock(node, by)


class Host(HostCache):
    """A HostCache that knows the engine's requests. `options` are those of HostCache."""

    def __init__(self, engine, **options):
        self.engine, self.size = engine, engine.page_tokens
        engine.host, engine.cache.device = self, Pages(engine.cache)
        layout = Prefix(keys_and_values(engine.model.kv, block_dim=2), block_tokens=self.size)
        self.hasher = ChainHasher(CHUNK_TOKENS)
        super().__init__(engine.cache.device, [layout], chunk_tokens=CHUNK_TOKENS, **options)

    def may_run(self, request):
        def allocate(start, boundary):
            if (wanted := (boundary - start) // self.size) > self.engine.cache.room:
                return None
            request.kept = start // self.size  # the tree may have more; the load has pages of its own
            request.pages[request.kept :] = self.engine.cache.allocate(wanted)
            return request.pages[request.kept :]

        keys = self.hasher.keys(request.tokens)
        n = len(request.tokens)
        answer = self.start(request.id, keys, num_tokens=n, on_device=request.length, allocate=allocate)
        if not isinstance(answer, Pending):
            request.keys = keys
        return answer == Miss()

    def kept(self, request):
        self.hasher.extend(request.keys, request.tokens[: request.kept * self.size])
        self.engine.cache.device.computed(request.keys, request.pages[: request.kept])

    def ended(self, request):
        if request.keys is not None:
            self.end(request.id, request.kept * self.size)

    def stepped(self, requests):
        computed = [(request.id, request.kept * self.size) for request in requests]
        for id, resume_at in self.end_step(computed) if requests else self.drain():
            request = self.engine.loading.pop(id)
            if resume_at > request.length:  # the load went well: what it brought goes into the tree
                request.length = resume_at
                self.engine.keep(request)
            self.engine.loaded(request)
