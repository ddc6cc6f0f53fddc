"""Prompt lookup: a draft is copied from where the row's last tokens stood before."""

from collections.abc import Sequence

from workers.proposer import Confidence, Draft

_MAX_MATCH = 16  # Longer matches are as good as this one.


class NgramProposer:
    """Copy what followed the latest earlier occurrence of the row's last n tokens.

    The longest n-gram that occurs wins, from `max_n` down to `min_n` (Saxena, "Prompt Lookup
    Decoding", 2023). The copy may run into itself, so that a loop is drafted as far as asked.
    """

    def __init__(self, min_n: int, max_n: int) -> None:
        self._sizes = range(max_n, min_n - 1, -1)
        self._tokens: list[int] = []
        # n-gram -> position of the token after its latest occurrence.
        self._following: dict[tuple[int, ...], int] = {}

    def extend(self, token_ids: Sequence[int]) -> None:
        """Index the n-grams that the new tokens follow."""
        for token_id in token_ids:
            position = len(self._tokens)
            for n in self._sizes:
                if n <= position:
                    self._following[tuple(self._tokens[position - n :])] = position
            self._tokens.append(token_id)

    def propose(self, max_tokens: int) -> Draft:
        """Copy up to `max_tokens` tokens from the longest match."""
        for n in self._sizes:
            start = (
                self._following.get(tuple(self._tokens[-n:])) if n <= len(self._tokens) else None
            )
            if start is not None:
                known = self._tokens[start : start + max_tokens]
                length = self._match_length(start, n)
                return Draft(
                    tuple(known[j % len(known)] for j in range(max_tokens)),
                    tuple(Confidence(length + j) for j in range(max_tokens)),
                )
        return Draft()

    def _match_length(self, start: int, known: int) -> int:
        """How many tokens before `start` are the row's last ones, of which `known` are known to be."""
        tokens, length = self._tokens, known
        longest = min(start, _MAX_MATCH)
        while length < longest and tokens[start - 1 - length] == tokens[-1 - length]:
            length += 1
        return length
