"""Faults of ATOM's scheduler that are there without any connector, mended: else comparisons would end at them.

Each is shown in test_faults_of_atom.py, by ATOM alone. A variant of the simulation mends only what it would run into.
"""


def answers_of_preempted_requests_are_prompt(engine):
    """ATOM takes a prefill for complete at the end of the prompt, also that of a request that was preempted and has an
    answer to compute again. If a chunk ends within the answer, it goes on over KV that nobody wrote.

    And where tokens are deferred, the one that stands in for the last token is computed like a real one.

    Here the answer becomes part of the prompt, and what stands in for a token is dropped.
    """
    preempt = engine.scheduler.preempt

    def preempt_and_mend(seq):
        if seq.num_placeholder_tokens and not seq.is_partial_prefill:
            del seq.token_ids[-1:], seq.output_tokens[-1:]
            seq.num_tokens -= 1
            engine.sampled.pop(seq.id, None)
        preempt(seq)
        seq.max_tokens -= seq.num_tokens - seq.num_prompt_tokens
        seq.num_prompt_tokens = seq.num_tokens
        return True

    engine.scheduler.preempt = preempt_and_mend


def hashes_of_answers_wait_for_a_token(engine):
    """Where tokens are deferred, ATOM gives a block of an answer its hash before the last token in it is computed, if a
    prefill of other requests comes between. Whoever finds the block before that, or after the request has ended,
    reads what nobody wrote. Here it has to know one token more.
    """
    hash_blocks = engine.manager.hash_decode_blocks
    engine.manager.hash_decode_blocks = lambda seq, committed, **said: hash_blocks(seq, committed - 1, **said)


def chunks_computed_from_before_a_reset_are_not_found(engine):
    """When ATOM clears its cache, requests that have blocks go on with them. What they compute from these gets hashes,
    and states, and others find it. Here it has its hash, as the connector sees it, and nobody finds it.
    """
    manager, hash_blocks = engine.manager, engine.manager.hash_blocks
    publish, may_keep_states = manager.kv.publish, manager.checkpointers_at

    def hash_blocks_and_mend(seq, *said, **more):
        if engine.is_of_before(seq):
            manager.kv.publish = lambda block, hash, tokens: manager.kv.block(block).update(hash, tokens)
            manager.checkpointers_at = lambda *_: []
        hash_blocks(seq, *said, **more)
        manager.kv.publish, manager.checkpointers_at = publish, may_keep_states

    manager.hash_blocks = hash_blocks_and_mend


def aborted_requests_compute_what_they_have(engine):
    """Where tokens are deferred, a request that is aborted in its last chunk of prefill is computed once more, at the
    last position of its prompt, with the token that was sampled there. If the prompt ends with a block, that block has
    its hash already, and whoever finds it reads the KV of another token. Here the last token is computed again.
    """
    compute = engine._compute

    def compute_and_mend(seq, start, stop, is_prefill):
        sampled = engine.sampled
        if seq.num_tokens == seq.num_prompt_tokens:
            engine.sampled = {id: token for id, token in sampled.items() if id != seq.id}
        token = compute(seq, start, stop, is_prefill)
        engine.sampled = sampled
        return token

    engine._compute = compute_and_mend
