"""Damages of a snapshot: one function for each, which gives a damaged copy.

Each takes what the model keeps, a snapshot, the states of an earlier boundary, and a number that varies the place.
"""

import torch

from tests.connector.running import BLOCK


def nothing(past, snapshot, stale, seed):
    return snapshot


def a_page_of_a_full_layer(past, snapshot, stale, seed):
    full = [each.clone() for each in snapshot.full]
    layer, page = seed % (len(full) // 2), seed % (snapshot.length // BLOCK)
    for part in full[2 * layer : 2 * layer + 2]:
        part[page * BLOCK : (page + 1) * BLOCK] = 0
    return snapshot.but(full=full)


def the_oldest_block_of_a_window(past, snapshot, stale, seed):
    windows = [each.clone() for each in snapshot.windows]
    windows[0][0] = 0
    return snapshot.but(windows=windows)


def a_layer_of_the_newest_block_of_a_window(past, snapshot, stale, seed):
    windows = [each.clone() for each in snapshot.windows]
    spans = [span for _, span in past.locals[0].parts.spans(BLOCK)]
    for span in spans[2 * (seed % (len(spans) // 2)) :][:2]:
        windows[0][-1, span] = 0
    return snapshot.but(windows=windows)


def all_states(past, snapshot, stale, seed):
    return snapshot.but(states=torch.zeros_like(snapshot.states))


def a_convolution_state(past, snapshot, stale, seed):
    return without_state(past, snapshot, "conv", seed)


def a_recurrent_state(past, snapshot, stale, seed):
    return without_state(past, snapshot, "recurrent", seed)


def without_state(past, snapshot, name, seed):
    spans = [span for part, span in past.states.spans() if part.name == name]
    states = snapshot.states.clone()
    states[spans[seed % len(spans)]] = 0
    return snapshot.but(states=states)


def the_states_a_block_earlier(past, snapshot, stale, seed):
    return snapshot.but(states=stale)


PAGE = [a_page_of_a_full_layer]
WINDOW = [the_oldest_block_of_a_window, a_layer_of_the_newest_block_of_a_window]
CONVOLUTION = [all_states, a_convolution_state, the_states_a_block_earlier]
RECURRENT = [a_recurrent_state]
DAMAGES = {
    "llama": PAGE,
    "qwen3": PAGE,
    "gemma3": PAGE + WINDOW,
    "gpt_oss": PAGE + WINDOW,
    "qwen3_next": PAGE + CONVOLUTION + RECURRENT,
    "qwen3_5": PAGE + CONVOLUTION + RECURRENT,
    "bamba": PAGE + CONVOLUTION + RECURRENT,
    "falcon_h1": PAGE + CONVOLUTION + RECURRENT,
    "lfm2": PAGE + CONVOLUTION,
    "deepseek_v3": PAGE,
    "deepseek_v3_dense": PAGE,
    "llama4": PAGE + WINDOW,
    "jamba": PAGE + CONVOLUTION + RECURRENT,
}
