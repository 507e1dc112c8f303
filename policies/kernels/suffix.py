"""Suffix automata of texts (Blumer et al., 1985), and the weights of the tokens after a substring (PPM-C).

An automaton is a tuple of int64 arrays: states [., 5], edges [., 4], a hash table of the edges by state and token, and
sizes [3]. State 0 is the start. Edge 0 is not used, so that 0 means "no edge" and "no state".
"""

from __future__ import annotations

from typing import Any

from ..features import AGREEMENT_WEIGHT
from .compiled import kernel, kernel_part

LINK, LENGTH, COUNT, FIRST, LAST = range(5)
"""Columns of the states: state of the longest suffix that also occurs elsewhere (-1 for the start), length of the longest
substring, number of occurrences, first and last edge."""

STATE, TOKEN, TARGET, NEXT = range(4)
"""Columns of the edges: state, token, state after the token, and the next edge of the same state."""

STATES, EDGES, CURRENT = range(3)
"""Entries of the sizes: number of states, number of edges, state of the current text."""

SHARED_STATE, SHARED_LENGTH, PROPOSED, MATCH_LENGTH, MATCH_COUNT = range(5)
"""Entries of the facts about a text: the longest suffix that occurs in the shared texts, number of tokens proposed after the
text, length and number of earlier occurrences of its longest match."""

MAX_SINGLE = 256
"""Maximum number of single tokens that share the weight which no suffix explains."""

MAX_COUNTED = 64
"""Suffixes that are counted at each token, the longest first. More exist only in texts that repeat themselves immediately,
where each has one continuation anyway."""

_AUTOMATON = "Tuple((int64[:,::1], int64[:,::1], int64[::1], int64[::1]))"


@kernel_part
def _slot(automaton: Any, state: Any, token: Any) -> Any:
    """Return the slot of the hash table that has an edge, or in which it would be inserted."""
    _, edges, table, _ = automaton
    last = table.shape[0] - 1
    slot = state * 0x9E3779B1 + token * 0x85EBCA77
    slot = (slot ^ (slot >> 15)) & last
    while table[slot] and (edges[table[slot], STATE] != state or edges[table[slot], TOKEN] != token):
        slot = (slot + 1) & last
    return slot


@kernel_part
def _target(automaton: Any, state: Any, token: Any) -> Any:
    """Return the state after a token, 0 if there is none."""
    return automaton[1][automaton[2][_slot(automaton, state, token)], TARGET]


@kernel_part
def _add_edge(automaton: Any, state: Any, token: Any, target: Any) -> None:
    states, edges, table, sizes = automaton
    sizes[EDGES] += 1
    edge = sizes[EDGES]
    table[_slot(automaton, state, token)] = edge
    edges[edge, STATE], edges[edge, TOKEN], edges[edge, TARGET] = state, token, target
    if states[state, LAST]:
        edges[states[state, LAST], NEXT] = edge
    else:
        states[state, FIRST] = edge
    states[state, LAST] = edge


@kernel_part
def _add_state(automaton: Any, length: Any, link: Any, count: Any) -> Any:
    states, _, _, sizes = automaton
    new = sizes[STATES]
    sizes[STATES] += 1
    states[new, LENGTH], states[new, LINK], states[new, COUNT] = length, link, count
    return new


@kernel_part
def _split(automaton: Any, state: Any, token: Any, old: Any) -> Any:
    """Return a separate state for the substrings of `old` that end with those of `state` and a token."""
    states, edges, table, _ = automaton
    copy = _add_state(automaton, states[state, LENGTH] + 1, states[old, LINK], states[old, COUNT])
    edge = states[old, FIRST]
    while edge:
        _add_edge(automaton, copy, edges[edge, TOKEN], edges[edge, TARGET])
        edge = edges[edge, NEXT]
    states[old, LINK] = copy
    while state >= 0 and _target(automaton, state, token) == old:
        edges[table[_slot(automaton, state, token)], TARGET] = copy
        state = states[state, LINK]
    return copy


@kernel_part
def _append(automaton: Any, token: Any) -> None:
    """Append a token to the current text."""
    states, _, _, sizes = automaton
    state = sizes[CURRENT]
    length, existing = states[state, LENGTH] + 1, _target(automaton, state, token)
    if existing:  # of an earlier text; its state is split if it also has longer substrings
        is_exact = states[existing, LENGTH] == length
        current = existing if is_exact else _split(automaton, state, token, existing)
    else:
        current = _add_state(automaton, length, 0, 0)
        while state >= 0 and not _target(automaton, state, token):
            _add_edge(automaton, state, token, current)
            state = states[state, LINK]
        if state >= 0:
            old = _target(automaton, state, token)
            is_exact = states[old, LENGTH] == states[state, LENGTH] + 1
            states[current, LINK] = old if is_exact else _split(automaton, state, token, old)
    sizes[CURRENT] = state = current
    for _ in range(MAX_COUNTED):
        if state == 0:
            break
        states[state, COUNT] += 1
        state = states[state, LINK]


@kernel_part
def _step(automaton: Any, state: Any, length: Any, token: Any) -> Any:
    """Return state and length of the longest suffix of a substring and one more token that occurs in the texts."""
    while not _target(automaton, state, token):
        if state == 0:
            return 0, 0
        state = automaton[0][state, LINK]
        length = automaton[0][state, LENGTH]
    return _target(automaton, state, token), length + 1


@kernel_part
def _weigh(automaton: Any, state: Any, sums: Any, touched: Any, tokens: Any, weights: Any) -> Any:
    """Write the likeliest tokens after a substring and after its suffixes, descending; return their number.

    After n continuations, d of them different, the share d / (n + d) goes to the shorter suffix. Ties are broken by token
    id, so that the order of the texts does not matter.
    """
    states, edges, _, _ = automaton
    share, is_matched, count, proposed = 1.0, False, 0, 0
    while state >= 0 and share > 1e-6:
        different, total, edge = 0, 0, states[state, FIRST]
        if state == 0 and not is_matched:  # unconditional counts alone say nothing
            break
        while edge and (state or different < MAX_SINGLE):
            total += states[edges[edge, TARGET], COUNT]
            different += 1
            edge = edges[edge, NEXT]
        total += different  # n + d
        edge = states[state, FIRST]
        for _ in range(different):
            token, times = edges[edge, TOKEN], states[edges[edge, TARGET], COUNT]
            if times and 0 <= token < sums.shape[0]:  # others of a text or a file have no score
                if sums[token] == 0.0:
                    touched[count] = token
                    count += 1
                sums[token] += share * times / total
            edge = edges[edge, NEXT]
        if different:
            is_matched = True
            share *= different / total
        state = states[state, LINK]
    for index in range(count):
        token = touched[index]
        weight, at, sums[token] = sums[token], proposed, 0.0
        while at and (weights[at - 1] < weight or (weights[at - 1] == weight and tokens[at - 1] > token)):
            at -= 1
        proposed = min(proposed + (at < weights.shape[0]), weights.shape[0])
        for later in range(proposed - 1, at, -1):
            tokens[later], weights[later] = tokens[later - 1], weights[later - 1]
        if at < proposed:
            tokens[at], weights[at] = token, weight
    return proposed


@kernel_part
def _propose(
    text: Any, shared: Any, path: Any, facts: Any, sums: Any, touched: Any, tokens: Any, weights: Any
) -> tuple[Any, Any, Any]:
    """Write the likeliest tokens after a text and a path; return their number, and length and count of the match."""
    state = max(text[0][text[3][CURRENT], LINK], 0)  # of the longest suffix that occurs earlier
    length = text[0][state, LENGTH]
    shared_state, shared_length = facts[SHARED_STATE], facts[SHARED_LENGTH]
    for token in path:
        state, length = _step(text, state, length, token)
        shared_state, shared_length = _step(shared, shared_state, shared_length, token)
    if shared_length > length:
        proposed = _weigh(shared, shared_state, sums, touched, tokens, weights)
        return proposed, shared_length, shared[0][shared_state, COUNT]
    if not length:
        return 0, 0, 0
    # The end of the text is no earlier occurrence.
    return _weigh(text, state, sums, touched, tokens, weights), length, text[0][state, COUNT] - 1


@kernel_part
def _refresh(text: Any, shared: Any, facts: Any, sums: Any, touched: Any, tokens: Any, weights: Any) -> None:
    """Write what is proposed after a text, and facts about its match."""
    facts[PROPOSED], facts[MATCH_LENGTH], facts[MATCH_COUNT] = _propose(
        text, shared, facts[:0], facts, sums, touched, tokens, weights
    )


@kernel(
    f"int64({_AUTOMATON}, {_AUTOMATON}, int64[::1], int64[::1], float64[::1], int64[::1], int64[::1], float64[::1])"
)
def propose(text: Any, shared: Any, path: Any, facts: Any, sums: Any, touched: Any, tokens: Any, weights: Any) -> Any:
    """Write the likeliest tokens after a text and a path of candidates, and return their number.

    Args:
        text, shared: automata of the text, and of the texts that are searched in addition.
        path: tokens of the candidates.
        facts: [5] of the text.
        sums, touched: [V], memory for intermediate results; `sums` is 0 before and after.
        tokens, weights: [n] the likeliest tokens, descending, and their weights.
    """
    return _propose(text, shared, path, facts, sums, touched, tokens, weights)[0]


@kernel(
    f"void({_AUTOMATON}, {_AUTOMATON}, int64[::1], int64[::1], float64[::1], float64[::1], int64[::1], int64[::1], "
    "float64[::1])"
)
def extend(
    text: Any, shared: Any, new: Any, facts: Any, agreement: Any, sums: Any, touched: Any, tokens: Any, weights: Any
) -> None:
    """Append new tokens to a text.

    Args:
        agreement: [2] number of the last tokens that were the likeliest ones, and running mean of that.
        facts, tokens, weights: see `propose`, of the empty path, before and after.
    """
    for index, token in enumerate(new):
        if index:
            _refresh(text, shared, facts, sums, touched, tokens, weights)
        agrees = facts[PROPOSED] > 0 and tokens[0] == token
        agreement[0] = agreement[0] + 1.0 if agrees else 0.0
        agreement[1] = AGREEMENT_WEIGHT * agreement[1] + (1.0 - AGREEMENT_WEIGHT) * agrees
        _append(text, token)
        facts[SHARED_STATE], facts[SHARED_LENGTH] = _step(shared, facts[SHARED_STATE], facts[SHARED_LENGTH], token)
    _refresh(text, shared, facts, sums, touched, tokens, weights)


@kernel(f"void({_AUTOMATON}, int64[::1])")
def append(automaton: Any, new: Any) -> None:
    """Append tokens to the current text of an automaton."""
    for token in new:
        _append(automaton, token)


@kernel(f"UniTuple(int64, 2)({_AUTOMATON}, int64[::1])")
def match(automaton: Any, tokens: Any) -> Any:
    """Return state and length of the longest suffix of `tokens` that occurs in the texts."""
    state, length = 0, 0
    for token in tokens:
        state, length = _step(automaton, state, length, token)
    return state, length


@kernel("void(int64[:,::1], int64[::1], int64)")
def fill_table(edges: Any, table: Any, count: Any) -> None:
    """Insert edges 1 to `count` into an empty hash table."""
    for edge in range(1, count + 1):
        table[_slot((edges, edges, table, table), edges[edge, STATE], edges[edge, TOKEN])] = edge
