"""Sessions of streaming input: one request whose prompt grows while it lives, by the next parts of its client.

    first part     loaded like any prompt
    later parts    computed behind what the session has: vLLM calls no connector
    all of it      not stored, because vLLM 0.32 leaves wrong KV under the hashes of later parts (without any connector)

Only with asynchronous scheduling: otherwise vLLM 0.32 never ends the second part.
"""

from collections.abc import Sequence

import pytest
import torch
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from tests.vllm.models import some_tokens
from tests.vllm.real_cache import BLOCKS, GROUPS, PROMPTS, CachedEngine, Copies, folder_of
from tests.vllm.real_engine import BLOCK, TOLERANCE, Answer, RealEngine, cold_answers, differences

PARTS = PROMPTS[0], some_tokens(75, "second"), some_tokens(40, "third")
SAID = 4  # tokens, to each part
ASKED = dict(max_tokens=SAID, temperature=0, logprobs=-1, flat_logprobs=True, ignore_eos=True, detokenize=False)

on_two_models = pytest.mark.parametrize("model", ["llama", "gemma3"])


class Session:
    """The only request of an engine. Its client waits for each answer, or sends all parts at once."""

    def __init__(self, engine: RealEngine, *, at_once: bool = False) -> None:
        self._vllm = engine.llm.llm_engine
        self._vocabulary = engine.llm.model_config.get_vocab_size()
        self._requests = engine.scheduler.requests
        self._name: str | None = None
        self._said: list[int] = []
        self._logprobs: list[torch.Tensor] = []
        for part in PARTS:
            self._send(part)
            if not at_once:
                self._wait()
        self._wait()
        request = self._requests[self._name]
        self.tokens = list(request.all_token_ids)[: request.num_computed_tokens]
        self._send([0], last=True)
        self.answer = Answer(self._said, torch.stack(self._logprobs), 0, 0)

    def _send(self, part: Sequence[int], *, last: bool = False) -> None:
        request = self._vllm.input_processor.process_inputs(
            self._name or "session",
            {"prompt_token_ids": list(part)},
            SamplingParams(output_kind=RequestOutputKind.DELTA, **ASKED),
            supported_tasks=self._vllm.get_supported_tasks(),
            resumable=not last,
        )
        if self._name is None:
            self._vllm.input_processor.assign_request_id(request)
            self._name = request.request_id
        request.external_req_id = "session"
        self._vllm.output_processor.add_request(request, None, None, 0)
        self._vllm.engine_core.add_request(request)

    def _wait(self) -> None:
        """Until vLLM waits for the next part."""
        for _ in range(1000):
            if self._requests[self._name].status.name == "WAITING_FOR_STREAMING_REQ":
                return
            for output in self._vllm.step():
                self._read(*output.outputs)
        raise AssertionError("the session does not come to its end")

    def _read(self, said: object) -> None:
        flat = said.logprobs
        for start, stop in zip(flat.start_indices, flat.end_indices, strict=True):
            row = torch.empty(self._vocabulary)
            row[flat.token_ids[start:stop]] = torch.tensor(flat.logprobs[start:stop])
            self._logprobs.append(row)
        self._said += said.token_ids


def cached(model: str, **options: object) -> CachedEngine:
    return CachedEngine(folder_of(model), offload="eager", engine=dict(asynchronous=True), **options)


def expected(model: str, **how: bool) -> Session:
    with RealEngine(folder_of(model), asynchronous=True) as engine:
        return Session(engine, **how)


@on_two_models
@pytest.mark.parametrize("at_once", [False, True], ids=["in turn", "at once"])
def test_a_session_is_loaded_at_its_beginning_and_not_stored(model, at_once):
    right = expected(model, at_once=at_once)
    with cached(model) as engine:
        engine.answer(PARTS[:1])
        engine.forget()
        session = Session(engine, at_once=at_once)
        assert engine.statistics.hit_tokens == BLOCKS * BLOCK
        engine.forget()
        answers = engine.answer([session.tokens])
        engine.check_nothing_leaked()
    assert len(session.answer.tokens) == SAID * len(PARTS) and session.tokens == right.tokens
    assert max(differences([session.answer], [right.answer])) <= TOLERANCE
    assert answers[0].loaded_tokens == BLOCKS * BLOCK, "more of the session than its first part"
    assert max(differences(answers, cold_answers(folder_of(model), [right.tokens]))) <= TOLERANCE


def test_a_damaged_load_shows_in_a_session():
    with cached("llama", copies=Copies(damaged=GROUPS["llama"][0])) as engine:
        engine.answer(PARTS[:1])
        engine.forget()
        damaged = Session(engine).answer
    assert max(differences([damaged], [expected("llama").answer])) > TOLERANCE
