"""Says which fields of a logged request decide nothing about its prompt, and which lines are of failed requests.

What is neither here nor read is named by `convert` as ignored: it may be what a chat template or a cache's key needs.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from cpu_prefix_cache.replay.log_times import TIMES

STATUSES = ("status", "status_code", "statusCode", "response_status", "http_status")
ERRORS = ("error", "errors", "exception", "error_str")
FAILED = 400
FAILED_WORDS = ("failure", "failed", "error", "cancelled")
NO_ERROR = ("-", "none", "null")

SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "typical_p", "n", "best_of", "seed", "do_sample", "sampling_params"),
    *("max_tokens", "max_completion_tokens", "max_output_tokens", "max_new_tokens", "min_tokens", "ignore_eos"),
    *("stop", "stop_sequences", "stop_token_ids", "logprobs", "top_logprobs", "prompt_logprobs", "logit_bias", "echo"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "length_penalty", "parameters", "output_length"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs", "use_beam_search"),
    *("return_logprob", "logprob_start_len", "top_logprobs_num", "return_text_in_logprobs"),
)
OF_THE_SERVICE = (
    *("stream", "stream_options", "user", "metadata", "store", "service_tier", "parallel_tool_calls", "priority"),
    *("safety_identifier", "prompt_cache_key", "background", "include", "skip_special_tokens", "return_token_ids"),
    *("include_stop_str_in_output", "spaces_between_special_tokens", "log_metrics", "no_logs", "received_time"),
    *("id", "rid", "request_id", "custom_id", "trace_id", "session_id", "conversation_id", "conversation_hash"),
    *("object", "type", "event", "level", "logger", "method", "path", "url", "uri", "endpoint", "host", "remote_addr"),
    *("response", "response_body", "output", "choices", "completion", "usage", "latency", "duration", "request_time"),
    *("endTime", "end_time", "completed_at", "language", "turn", "redacted", "openai_moderation"),
    *("input_tokens", "output_tokens", "prompt_tokens", "completion_tokens", "total_tokens", "input_length"),
)
WITHOUT_EFFECT = frozenset((*SAMPLING, *OF_THE_SERVICE, *TIMES, *STATUSES, *ERRORS))
SIGNS_OF_A_REQUEST = frozenset(
    (
        *("model", "url", "uri", "path", "endpoint", "usage", "sampling_params", "parameters"),
        *("prompt_tokens", "input_tokens", "total_tokens", "input_length", "output_length"),
        *("max_tokens", "max_new_tokens", "max_output_tokens", "temperature"),
    )
)


def is_failed(line: Mapping[str, Any]) -> bool:
    """Whether the line, or the response in it, has a status from 400 on, or an error."""
    places = [line, line.get("response")]
    return any(_has_failed(place) for place in places if isinstance(place, Mapping))


def _has_failed(place: Mapping[str, Any]) -> bool:
    statuses = (str(place.get(name, "")).lower() for name in STATUSES)
    errors = (place.get(name) for name in ERRORS)
    return any(status in FAILED_WORDS or (status.isdecimal() and int(status) >= FAILED) for status in statuses) or any(
        error and str(error).lower() not in NO_ERROR for error in errors
    )


def unknown_fields(places: Iterable[Mapping[str, Any]], known: Iterable[str]) -> Iterator[str]:
    """Names of fields that have a value, and that are neither known nor without effect."""
    known = WITHOUT_EFFECT.union(known)
    for place in places:
        yield from (
            name for name, value in place.items() if name not in known and value not in (None, False, "", [], {})
        )
