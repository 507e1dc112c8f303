"""A suffix automaton that grows token by token: all substrings of the texts that it was told, and how often each came.

It is the least automaton of a text's substrings, a suffix tree in its smallest form: two states a token at most. A state
stands for the substrings that end at the same places; its link leads to their longest suffix that also ends elsewhere.
"""

from __future__ import annotations

COUNTED = 64
"""Suffixes of a text that are counted at each token, the longest first: more are there only in texts that repeat themselves
at once, where each has one continuation anyway."""

START = 0


class SuffixAutomaton:
    """Substrings of one or several texts.

    Attributes:
        next: by state, the state after each token that came after it.
        link: by state, that of the longest suffix that came elsewhere too; -1 of the start.
        length: by state, that of its longest substring.
        count: by state, how often it came.
        last: the state of the whole text so far.
    """

    def __init__(self) -> None:
        self.next: list[dict[int, int]] = [{}]
        self.link, self.length, self.count = [-1], [0], [0]
        self.last = START

    def begin(self) -> None:
        """Begin a further text."""
        self.last = START

    def append(self, token: int) -> None:
        """Append a token to the text."""
        known = self.next[self.last].get(token)
        if known is not None:  # of an earlier text
            # Its state may stand for longer substrings too, which this text does not end with: then it is split.
            longer = self.length[self.last] + 1
            self.last = known if self.length[known] == longer else self._split(self.last, token, known)
        else:
            self.last = self._grow(token)
        # Whatever ends here came once more: the whole text, and its suffixes along the links.
        state = self.last
        for _ in range(COUNTED):
            if state == START:
                break
            self.count[state] += 1
            state = self.link[state]

    def _grow(self, token: int) -> int:
        """Return the new state of the text with a token more."""
        new, state = self._add(self.length[self.last] + 1, {}, START, 0), self.last
        # The usual construction (Blumer et al., 1985): suffixes that this token has never followed lead to the new state.
        while state >= 0 and token not in self.next[state]:
            self.next[state][token] = new
            state = self.link[state]
        if state >= 0:
            old = self.next[state][token]
            self.link[new] = old if self.length[old] == self.length[state] + 1 else self._split(state, token, old)
        return new

    def _split(self, state: int, token: int, old: int) -> int:
        """Return a state of its own for those substrings of `old` that end what `state` and a token make."""
        # Both came equally often so far, hence the count; `append` counts on from there.
        copy = self._add(self.length[state] + 1, dict(self.next[old]), self.link[old], self.count[old])
        self.link[old] = copy
        # From the first suffix that leads elsewhere on, all shorter ones do.
        while state >= 0 and self.next[state].get(token) == old:
            self.next[state][token] = copy
            state = self.link[state]
        return copy

    def _add(self, length: int, next_: dict[int, int], link: int, count: int) -> int:
        self.next.append(next_)
        self.link.append(link)
        self.length.append(length)
        self.count.append(count)
        return len(self.next) - 1

    def step(self, state: int, length: int, token: int) -> tuple[int, int]:
        """Return the longest known suffix of a substring and a token more, as its state and its length.

        Args:
            state, length: of the substring, which is one of the state's.
            token: after it.
        """
        while token not in self.next[state]:
            if state == START:
                return START, 0
            state = self.link[state]
            length = self.length[state]  # of the linked state's longest substring, a suffix of this one
        return self.next[state][token], length + 1

    def earlier(self) -> tuple[int, int]:
        """Return state and length of the text's longest suffix that came before as well."""
        state = max(self.link[self.last], START)  # the start's own link is -1
        return state, self.length[state]
