"""Drafts from a suffix automaton: the longest suffix of the row that was seen before, and what
usually followed it.

The automaton holds every substring of the texts put into it, each state the substrings that end at
the same places (Blumer et al., "The smallest automaton recognizing the subwords of a text", 1985;
as a drafter: SAM-Decoding, arXiv 2411.10666, and SuffixDecoding, arXiv 2411.04975, which counts). With
a pool, the rows of a worker share one: what another row said, or is saying, can be drafted too.
"""

from collections.abc import Sequence

from workers.proposer import Confidence, Draft
from workers.request import Request

_ROOT = 0
# States up the suffix links that count a new token: what is used are the longest matches.
_COUNTED = 32
# Of so many continuations the latest is taken: none of them is likely.
_MANY = 16


class SuffixAutomaton:
    """All substrings of a set of growing texts. A text is a state: the one its next token is added to.

    A state stands for substrings that end at the same places; `link` leads to the longest suffix that
    also ends elsewhere.
    """

    def __init__(self) -> None:
        self.next: list[dict[int, int]] = [{}]
        self.link = [-1]
        self.length = [0]  # Of the state's longest substring.
        self.count = [
            0
        ]  # How often it ended somewhere; low for short substrings of repetitive texts.
        self.latest = [-1]  # The token that followed it last.
        self.num_tokens = 0

    def extend(self, text: int, token_id: int) -> int:
        """Add a token to the text that ends in state `text` (_ROOT: a new one); its new state."""
        end = self._append(text, token_id)
        self.num_tokens += 1
        self._count(text, end, token_id)
        return end

    def _append(self, text: int, token_id: int) -> int:
        known = self.next[text].get(token_id)
        if known is not None:  # Another text has gone on like this.
            return self._exactly(text, token_id, known)
        end = self._new_state({}, self.length[text] + 1, 0, -1)
        state = text
        while state != -1 and token_id not in self.next[state]:
            self.next[state][token_id] = end
            state = self.link[state]
        if state == -1:
            self.link[end] = _ROOT
        else:
            self.link[end] = self._exactly(state, token_id, self.next[state][token_id])
        return end

    def _exactly(self, state: int, token_id: int, target: int) -> int:
        """The state whose longest substring is that of `state` and the token; split off if need be."""
        if self.length[target] == self.length[state] + 1:
            return target
        split = self._new_state(
            dict(self.next[target]),
            self.length[state] + 1,
            self.count[target],
            self.latest[target],
        )
        self.link[split] = self.link[target]
        self.link[target] = split
        while state != -1 and self.next[state].get(token_id) == target:
            self.next[state][token_id] = split
            state = self.link[state]
        return split

    def _new_state(self, following: dict[int, int], length: int, count: int, latest: int) -> int:
        self.next.append(following)
        self.link.append(-1)
        self.length.append(length)
        self.count.append(count)
        self.latest.append(latest)
        return len(self.link) - 1

    def _count(self, before: int, end: int, token_id: int) -> None:
        state, left = before, _COUNTED
        while state != -1 and left:
            self.latest[state] = token_id
            state, left = self.link[state], left - 1
        state, left = end, _COUNTED
        while state > _ROOT and left:
            self.count[state] += 1
            state, left = self.link[state], left - 1


class SuffixProposer:
    """Drafts for one row, whose text is in the automaton it is given."""

    def __init__(self, automaton: SuffixAutomaton) -> None:
        self._automaton = automaton
        self._text = _ROOT

    def extend(self, token_ids: Sequence[int]) -> None:
        """Add the tokens to the row's text."""
        for token_id in token_ids:
            self._text = self._automaton.extend(self._text, token_id)

    def propose(self, max_tokens: int) -> Draft:
        """Follow what came most often (of equals, last) after the longest suffix seen before."""
        automaton = self._automaton
        token_ids: list[int] = []
        confidences: list[Confidence] = []
        state, length = self._text, automaton.length[self._text]
        while len(token_ids) < max_tokens:
            while state != _ROOT and not automaton.next[state]:  # It ends where its texts do.
                state = automaton.link[state]
                length = automaton.length[state]
            if state == _ROOT:
                break
            token_id, share = self._likeliest(state)
            token_ids.append(token_id)
            confidences.append(Confidence(length, share))
            state, length = automaton.next[state][token_id], length + 1
        return Draft(tuple(token_ids), tuple(confidences))

    def _likeliest(self, state: int) -> tuple[int, float]:
        """The token that came most often after the state, and its share."""
        automaton = self._automaton
        following, latest = automaton.next[state], automaton.latest[state]
        if len(following) > _MANY and latest in following:
            return latest, automaton.count[following[latest]] / automaton.count[state]
        counts = {token_id: automaton.count[after] for token_id, after in following.items()}
        most = max(counts.values())
        best = latest if counts.get(latest) == most else max(counts, key=counts.__getitem__)
        return best, most / sum(counts.values())


class SuffixPool:
    """Makes proposers that share an automaton, until it holds so many tokens that a new one is begun."""

    def __init__(self, max_tokens: int) -> None:
        """`max_tokens`: 0: every row has an automaton of its own."""
        self._max_tokens = max_tokens
        self._automaton = SuffixAutomaton()

    def new_proposer(self, request: Request) -> SuffixProposer:  # noqa: ARG002
        """A proposer for a new row."""
        if self._automaton.num_tokens >= self._max_tokens:
            self._automaton = SuffixAutomaton()
        return SuffixProposer(self._automaton)
