"""Prefix caching: rows whose prompts begin with the same tokens compute that beginning once.

Keys and values at a position depend on the tokens up to it and on nothing else, so those of another
row with the same beginning are as good as a row's own, bit by bit. Rows of a job share a system
prompt, few-shot examples, or, as samples of one prompt, everything. A slot's content stays of use
after its row has ended, until another row writes there.
"""

from collections.abc import Sequence

from workers.backend import KVCache
from workers.row import Row

# A row waits for another to compute what they share if that saves so many tokens.
_WORTH_WAITING = 16


class PrefixCache:
    """Finds what a row's prompt shares with the rows, present and past, in the key/value cache."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._writers: list[Row | None] = [None] * cache.num_rows  # By slot, the last that wrote.

    def start(self, row: Row) -> bool:
        """Before a row's first pass: take over the longest beginning that has been computed.

        Returns:
            False if the row had better wait, as a row of the batch is computing more of its prompt.
            That row has started, so it never waits itself, and is heard of again in the next pass.
        """
        if self._writers[row.slot] is row:
            return True
        source, num_held, num_coming = row.slot, 0, 0
        for writer in filter(None, self._writers):
            shared = min(_common(row.token_ids, writer.token_ids), len(row.token_ids) - 1)
            if min(shared, writer.num_cached) > num_held:
                source, num_held = writer.slot, min(shared, writer.num_cached)
            if writer.is_prefilling:
                num_coming = max(num_coming, shared)
        if num_coming - num_held >= _WORTH_WAITING:
            return False
        self._cache.copy_prefix_(source, row.slot, num_held)
        row.num_cached = num_held
        self._writers[row.slot] = row
        return True


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    """How many tokens two sequences begin with alike."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return min(len(left), len(right))
