"""The radix engine with a host cache: answers about its pages, and calls by its tree and by its scheduler."""

from cpu_prefix_cache import ChainHasher, Miss, Pending, Prefix, RadixHostCache, keys_and_values

CHUNK_TOKENS = 16


class Host(RadixHostCache):
    """`options` are those of HostCache."""

    def __init__(self, engine, chunk_tokens=CHUNK_TOKENS, **options):
        self.engine, self.tree, self.size = engine, engine.cache, engine.page_tokens
        engine.host = engine.cache.device = self
        layout = Prefix(keys_and_values(engine.model.kv, block_dim=2), block_tokens=self.size)
        self.hasher = ChainHasher(chunk_tokens)
        super().__init__(self.tree.num_pages, [layout], chunk_tokens=chunk_tokens, hands_out_first=True, **options)

    @property
    def num_waiting(self):
        return len(self.tree.free_pages) + self.tree.evictable

    @property
    def num_promised(self):
        return self.tree.promised

    def free_pages(self):
        return self.tree.free_pages

    def free(self, pages):
        self.tree.free(pages)

    def parent(self, node):
        return node.parent

    def pages(self, node):
        return node.pages

    def last_use(self, node):
        return node.last_use

    def locks(self, node):
        return node.locks

    def lock(self, node, by):
        self.tree.lock(node, by)

    def may_run(self, request):
        def allocate(start, boundary):
            if (wanted := (boundary - start) // self.size) > self.tree.room:
                return None
            request.kept = start // self.size  # the tree may have more; the load has pages of its own
            request.pages[request.kept :] = self.tree.allocate(wanted)
            return request.pages[request.kept :]

        keys = self.hasher.keys(request.tokens)
        n = len(request.tokens)
        answer = self.start(request.id, keys, num_tokens=n, on_device=request.length, allocate=allocate)
        if not isinstance(answer, Pending):
            request.keys = keys
        return answer == Miss()

    def kept(self, request):
        self.hasher.extend(request.keys, request.tokens[: request.kept * self.size])
        self.inserted(request.id, request.pages[: request.kept])

    def ended(self, request):
        if request.keys is not None:
            self.end(request.id)

    def stepped(self, requests):
        for id, resume_at in self.end_step() if requests else self.drain():
            request = self.engine.loading.pop(id)
            if resume_at > request.length:  # the load went well: what it brought goes into the tree
                request.length = resume_at
                self.engine.keep(request)
            self.engine.loaded(request)
