"""Fields of a logged request that decide nothing about its prompt.

What is neither here nor read is named by `convert` as ignored: it may be what a chat template or a cache's key needs.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from cpu_prefix_cache.tools.replay.log_times import TIMES

STATUSES = ("status", "status_code", "statusCode", "response_status", "http_status")
ERRORS = ("error", "errors", "exception", "error_str")
SUCCESS = "success"
REQUEST_IDS = ("rid", "request_id", "id")
REASONS = ("finish_reason", "stop_reason", "done_reason", "reason")  # for which an answer ended

SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "typical_p",
    "n",
    "best_of",
    "seed",
    "do_sample",
    "sampling_params",
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
    "max_new_tokens",
    "min_tokens",
    "ignore_eos",
    "stop",
    "stop_sequences",
    "stop_token_ids",
    "logprobs",
    "top_logprobs",
    "prompt_logprobs",
    "logit_bias",
    "echo",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "length_penalty",
    "parameters",
    "output_length",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "structured_outputs",
    "use_beam_search",
    "return_logprob",
    "logprob_start_len",
    "top_logprobs_num",
    "return_text_in_logprobs",
    "allowed_token_ids",
    "bad_words",
    "detokenize",
    "output_kind",
    "regex",
    "json_schema",
    "ebnf",
    "structural_tag",
    "no_stop_trim",
    "watermark",
    "details",
    "decoder_input_details",
    "return_full_text",
    "top_n_tokens",
    "grammar",
)
OF_PARAMETERS = ("sampling_params", "parameters")  # objects of SAMPLING, and of what changes the prompt
FALSE_BY_DEFAULT = ("continue_final_message", "return_hidden_states", "return_tokens_as_token_ids", "truncate")
OF_THE_SERVICE = (
    "stream",
    "stream_options",
    "user",
    "metadata",
    "store",
    "service_tier",
    "parallel_tool_calls",
    "priority",
    "safety_identifier",
    "prompt_cache_key",
    "background",
    "include",
    "skip_special_tokens",
    "return_token_ids",
    "include_stop_str_in_output",
    "spaces_between_special_tokens",
    "log_metrics",
    "no_logs",
    "received_time",
    *REQUEST_IDS,
    "custom_id",
    "trace_id",
    "session_id",
    "conversation_id",
    "conversation_hash",
    "object",
    "type",
    "event",
    "level",
    "logger",
    "method",
    "path",
    "url",
    "uri",
    "endpoint",
    "host",
    "remote_addr",
    "response",
    "response_body",
    "output",
    "choices",
    "completion",
    "output_text",
    "generated_text",
    "usage",
    "meta_info",
    "latency",
    "duration",
    "request_time",
    "endTime",
    "end_time",
    "completed_at",
    "language",
    "turn",
    "redacted",
    "openai_moderation",
    "input_tokens",
    "output_tokens",
    "prompt_tokens",
    "completion_tokens",
    "total_tokens",
    "input_length",
)
WITHOUT_EFFECT = frozenset((*SAMPLING, *OF_THE_SERVICE, *TIMES, *STATUSES, *ERRORS, *REASONS, SUCCESS))
SIGNS_OF_A_REQUEST = frozenset(
    (
        "model",
        "url",
        "uri",
        "path",
        "endpoint",
        "usage",
        "sampling_params",
        "parameters",
        "prompt_tokens",
        "input_tokens",
        "total_tokens",
        "input_length",
        "output_length",
        "max_tokens",
        "max_new_tokens",
        "max_output_tokens",
        "temperature",
    )
)


def unknown_fields(places: Iterable[Mapping[str, Any]], known: Iterable[str]) -> Iterator[str]:
    """Names of fields that have a value, and that are neither known nor without effect."""
    known = WITHOUT_EFFECT.union(known)
    for place in places:
        parameters = (place.get(name) for name in OF_PARAMETERS)
        for fields in (place, *(each for each in parameters if isinstance(each, Mapping))):
            yield from (name for name, value in fields.items() if name not in known and _is_set(name, value))


def _is_set(name: str, value: Any) -> bool:
    if value is False:
        return name not in FALSE_BY_DEFAULT
    return value not in (None, "", [], {})
