"""The tokens of two outputs held against each other, sample by sample.

Where both have a shard with the same samples, it is read from both and done with. What is left is told
apart by digests, 32 bytes a sample, so that millions of rows that lie elsewhere in the other output fit
in memory.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from itertools import pairwise

import numpy as np
import pyarrow as pa

from pipeline.parts import list_parts, read_part
from pipeline.shards import read_shard

MOST_NAMED = 50


@dataclass(frozen=True)
class Unequal:
    """A sample with other tokens in the other run; the first `num_common` are the same."""

    id: str
    sample_idx: int
    num_common: int
    num_tokens: tuple[int, int]


@dataclass
class Agreement:
    """How far two outputs have the same tokens, by samples of the same id and index.

    Attributes:
        num_equal: with the same tokens.
        num_unequal: with others; `unequal` names the first of them.
        num_unanswered: that failed, or are the answer of another row, in one of the two at least.
        num_asked_differently: whose prompt or own parameters are not the same.
        num_alone: that only the first, only the second has.
    """

    num_equal: int = 0
    num_unequal: int = 0
    num_unanswered: int = 0
    num_asked_differently: int = 0
    num_alone: tuple[int, int] = (0, 0)
    unequal: list[Unequal] = field(default_factory=list)

    @property
    def num_compared(self) -> int:
        """Samples that both answered, asked the same."""
        return self.num_equal + self.num_unequal


@dataclass(frozen=True)
class _Samples:
    """Samples by digests, arrays [n]: of id and index, of what was asked, of the tokens (0: none of its
    own); and where they lie.
    """

    keys: np.ndarray
    asked: np.ndarray
    tokens: np.ndarray
    shards: np.ndarray
    rows: np.ndarray

    def take(self, which: np.ndarray) -> "_Samples":
        return _Samples(*(getattr(self, f.name)[which] for f in fields(self)))

    @classmethod
    def joined(cls, parts: list["_Samples"]) -> "_Samples":
        nothing = np.zeros(0, np.uint64)
        every = [cls(nothing, nothing, nothing, *_places(0, 0)), *parts]
        return cls(*(np.concatenate([getattr(p, f.name) for p in every]) for f in fields(cls)))


def compare_tokens(one: str, other: str, *, by_plan: bool) -> Agreement:
    """Compare all parts of two outputs.

    Args:
        one: an output.
        other: another.
        by_plan: whether both have their plans, which tell prompts and parameters to the token; else the
            texts of the prompts and their lengths have to do.

    Raises:
        DamagedPartError: a part cannot be read.
        DamagedOutputError: a prompt shard cannot be read.
    """
    found = Agreement()
    there = [set(list_parts(output)) for output in (one, other)]
    shards = sorted(there[0] | there[1])
    left: tuple[list[_Samples], list[_Samples]] = ([], [])
    for number, shard in enumerate(shards):
        pair = [
            _digest(output, shard, number, by_plan=by_plan) if shard in names else None
            for output, names in zip((one, other), there, strict=True)
        ]
        a, b = pair
        if a is not None and b is not None and np.array_equal(a.keys, b.keys):
            _count(found, a, b, _namer(one, other, shards))
        else:
            for samples, waiting in zip(pair, left, strict=True):
                waiting.extend([samples] if samples is not None else [])
    a, b = (_Samples.joined(parts) for parts in left)
    order = np.argsort(b.keys, kind="stable")
    at = np.searchsorted(b.keys, a.keys, sorter=order)
    match = order[np.minimum(at, len(order) - 1)] if len(order) else np.zeros(len(a.keys), int)
    both = b.keys[match] == a.keys if len(order) else np.zeros(len(a.keys), bool)
    _count(found, a.take(both), b.take(match[both]), _namer(one, other, shards))
    found.num_alone = (int((~both).sum()), len(b.keys) - int(both.sum()))
    return found


Namer = Callable[[_Samples, _Samples, np.ndarray], Iterator[Unequal]]


def _count(found: Agreement, a: _Samples, b: _Samples, name: Namer) -> None:
    """Take in pairs of samples of the same keys."""
    answered, asked = (a.tokens != 0) & (b.tokens != 0), a.asked == b.asked
    equal = a.tokens == b.tokens
    unequal = asked & answered & ~equal
    found.num_asked_differently += int((~asked).sum())
    found.num_unanswered += int((asked & ~answered).sum())
    found.num_equal += int((asked & answered & equal).sum())
    found.num_unequal += int(unequal.sum())
    room = MOST_NAMED - len(found.unequal)
    found.unequal.extend(name(a, b, np.flatnonzero(unequal)[:room]))


def _namer(one: str, other: str, shards: list[str]) -> Namer:
    def name(a: _Samples, b: _Samples, which: np.ndarray) -> Iterator[Unequal]:
        tables: dict[tuple[str, str], pa.Table] = {}
        for i in which:
            rows = []
            for output, samples in ((one, a), (other, b)):
                place = output, shards[samples.shards[i]]
                if place not in tables:
                    tables = {key: t for key, t in tables.items() if key[0] != output}  # One each.
                    tables[place] = read_part(*place)[0].select(list(_NAMED))
                rows += tables[place].slice(samples.rows[i], 1).to_pylist()
            tokens = [row["generated_tokens"] for row in rows]
            pairs = enumerate(zip(*tokens, strict=False))
            shorter = min(map(len, tokens))
            common = next((j for j, (x, y) in pairs if x != y), shorter)
            lengths = len(tokens[0]), len(tokens[1])
            yield Unequal(rows[0]["id"], rows[0]["sample_idx"], common, lengths)

    return name


_NAMED = ("id", "sample_idx", "generated_tokens")


def _digest(output: str, shard: str, number: int, *, by_plan: bool) -> _Samples:
    table, _ = read_part(output, shard)
    ids = table["id"].to_pylist()
    keys = [_hash(f"{i}\0{j}") for i, j in zip(ids, table["sample_idx"].to_pylist(), strict=True)]
    if by_plan:
        plan = read_shard(output, shard, ["id", "prompt_token_ids", "sampling_params"])
        params = [(text or "").encode() for text in plan["sampling_params"].to_pylist()]
        prompts = _lists(plan["prompt_token_ids"])
        asked_of = {
            i: _hash(prompt, own)
            for i, prompt, own in zip(plan["id"].to_pylist(), prompts, params, strict=True)
        }
        asked = [asked_of.get(i, 0) for i in ids]
    else:
        columns = [table[c].to_pylist() for c in ("prompt", "messages", "num_input_tokens")]
        asked = [_hash(repr(row)) for row in zip(*columns, strict=True)]
    is_own = table["error"].is_null().to_numpy() & table["answer_of"].is_null().to_numpy()
    reasons = table["finish_reason"].to_pylist()
    answers = zip(_lists(table["generated_tokens"]), reasons, is_own, strict=True)
    tokens = [_hash(answer, reason) if own else 0 for answer, reason, own in answers]
    shard_of, row_of = _places(len(table), number)
    k, a, t = (np.array(of, np.uint64) for of in (keys, asked, tokens))
    return _Samples(k, a, t, shard_of, row_of)


def _places(count: int, shard: int) -> tuple[np.ndarray, np.ndarray]:
    return np.full(count, shard, np.int32), np.arange(count, dtype=np.int32)


def _lists(column: pa.ChunkedArray) -> Iterator[bytes]:
    """The bytes of each list of numbers; of a null, none."""
    array = column.combine_chunks()
    offsets, values = array.offsets.to_numpy(), array.values.to_numpy()
    for start, end in pairwise(offsets):
        yield values[start:end].tobytes()


def _hash(*parts: str | bytes) -> int:
    """64 bits: of ten million samples, two are taken for one by a chance of one in 400,000."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part.encode() if isinstance(part, str) else part)
        digest.update(b"\0")
    return int.from_bytes(digest.digest()) or 1
