"""The one loop: admit, draft, verify, accept, retire.

Plain decoding is the same loop with nothing drafted, prefill the same pass with more tokens a row.
Ray is not needed here.
"""

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch

from workers.acceptance import accept
from workers.backend import StepBatch
from workers.budget import Candidate, DraftBudget
from workers.model import TargetModel
from workers.phases import Phases
from workers.prefix import PrefixCache
from workers.proposer import Draft, ProposerFactory
from workers.request import Completion, Request
from workers.row import Row
from workers.sampling import NonFiniteLogitsError, StepLogits
from workers.step_times import StepTimes
from workers.stopping import Detokenizer
from workers.tally import Tally

_NO_DRAFT = Draft()
_LOOKAHEAD = 256  # Requests that `generate` queues at once, the longest of which come first.


@dataclass(frozen=True)
class EngineLimits:
    """Sizes the engine is built for.

    Attributes:
        max_num_seqs: rows generated at once.
        max_num_batched_tokens: prompt tokens one pass may take beside the decoding rows' tokens.
        max_model_len: positions of a cache row: the longest prompt plus answer.
        num_spec_tokens: most tokens drafted per row and step; 0 drafts nothing.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_spec_tokens: int


@dataclass(frozen=True)
class _Window:
    """One row's part of a pass: tokens from its cached length on, the last `num_logits` of them with
    logits wanted, the last `num_drafted` of them drafted: the beginning of `draft`.
    """

    row: Row
    token_ids: list[int]
    num_logits: int
    draft: Draft = _NO_DRAFT
    num_drafted: int = 0


class Engine:
    """Generates completions with continuous batching and speculative verification."""

    def __init__(
        self,
        model: TargetModel,
        limits: EngineLimits,
        proposer_factory: ProposerFactory,
        detokenizer: Detokenizer,
        budget: DraftBudget | None = None,
    ) -> None:
        """Allocate the cache. Without a budget, what a proposer drafts is verified in full."""
        self._model = model
        self._limits = limits
        self._budget = budget
        self.phases = Phases()
        self.tally = Tally(limits.max_num_seqs)
        self._new_proposer = proposer_factory
        self._detokenizer = detokenizer
        self._cache = model.new_cache(limits.max_num_seqs, limits.max_model_len)
        self._prefixes = PrefixCache(self._cache)
        self._free_slots = list(range(limits.max_num_seqs))[::-1]
        self._waiting: deque[Request] = deque()
        self._rows: list[Row] = []

    @property
    def num_waiting(self) -> int:
        """Requests added but not yet in a row."""
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._waiting or self._rows)

    @property
    def step_times(self) -> StepTimes | None:
        """What passes cost here; None without a budget, which alone has them measured."""
        return None if self._budget is None else self._budget.times

    @property
    def cache_nbytes(self) -> int:
        """Bytes asked for by the key/value cache."""
        return self._cache.nbytes

    def add(self, requests: Iterable[Request]) -> None:
        """Queue requests behind those that wait, the longest first: what is left to do alone at the
        end is short then.
        """
        self._waiting += sorted(
            requests, key=lambda r: (r.params.max_tokens, len(r.prompt_token_ids)), reverse=True
        )

    def generate(self, requests: Iterable[Request]) -> Iterator[Completion]:
        """Yield one completion per request as they finish, pulling requests as slots come free."""
        source = iter(requests)
        while True:
            if self.num_waiting < self._limits.max_num_seqs:
                self.add(islice(source, max(_LOOKAHEAD, self._limits.max_num_seqs)))
            if not self.has_work:
                return
            yield from self.step()

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        """Run one pass over all rows and return the completions it finished."""
        phases = self.phases
        phases.start()
        refused = self._admit()
        prompts = self._plan_prompts()
        phases.lap("host")
        num_prompt_tokens = sum(len(window.token_ids) for window in prompts)
        decoding = self._plan_decoding(num_prompt_tokens)
        drafting = phases.lap("draft")
        if windows := decoding + prompts:
            logits = self._verify(windows)
            num_tokens = sum(len(window.token_ids) for window in decoding)
            seconds = phases.lap_pass(num_prompt_tokens, num_tokens)
            at = 0
            for window in windows:
                self._accept(window, logits, at)
                at += window.num_logits
            seconds += phases.lap("accept")
            if self._budget is not None and not prompts:
                self._budget.observe_step(len(decoding), num_tokens, seconds, drafting)
            self.tally.count_step(seconds + drafting)
        finished = self._retire()
        self.tally.count_samples(len(refused) + len(finished), len(self._rows), len(self._waiting))
        phases.lap("host")
        return refused + finished

    def _admit(self) -> list[Completion]:
        """Move waiting requests to free cache rows; requests that cannot run are refused."""
        refused = []
        while self._waiting and self._free_slots:
            request = self._waiting.popleft()
            if reason := self._reason_to_refuse(request):
                refused.append(
                    Completion(request, "error", error=reason, error_type="InvalidPrompt")
                )
                continue
            self._rows.append(
                Row(
                    request,
                    slot=self._free_slots.pop(),
                    proposer=self._new_proposer(request),
                    detokenizer=self._detokenizer,
                    eos_token_ids=self._model.architecture.eos_token_ids,
                    max_len=self._limits.max_model_len,
                )
            )
        return refused

    def _reason_to_refuse(self, request: Request) -> str | None:
        prompt, vocab_size = request.prompt_token_ids, self._model.architecture.vocab_size
        if not prompt:
            return "the prompt has no tokens"
        if len(prompt) >= self._limits.max_model_len:
            return (
                f"the prompt has {len(prompt)} tokens, and no room is left for an answer within "
                f"{self._limits.max_model_len}"
            )
        named = [*prompt, *request.params.stop_token_ids]
        if outside := [i for i in named if not 0 <= i < vocab_size]:
            return f"token id {outside[0]} is not in the vocabulary of {vocab_size}"
        return None

    def _plan_prompts(self) -> list[_Window]:
        """Chunks of the prompts that are not computed yet, as many tokens as a pass may add."""
        windows = []
        left = self._limits.max_num_batched_tokens
        for row in self._rows:
            if row.is_prefilling and left > 0 and self._prefixes.start(row):
                pending = row.pending_prompt
                chunk = pending[:left]
                left -= len(chunk)
                windows.append(_Window(row, chunk, int(len(chunk) == len(pending))))
        return windows

    def _plan_decoding(self, num_prompt_tokens: int) -> list[_Window]:
        """The newest token of every decoding row, and what is drafted behind it."""
        rows = [row for row in self._rows if not row.is_prefilling]
        if self._budget is not None and self._budget.is_paused:
            drafts = [_NO_DRAFT] * len(rows)
        else:
            drafts = [row.propose(self._limits.num_spec_tokens) for row in rows]
        lengths = self._draft_lengths(rows, drafts, num_prompt_tokens)
        return [
            _Window(row, [row.token_ids[-1], *draft.token_ids[:n]], n + 1, draft, n)
            for row, draft, n in zip(rows, drafts, lengths, strict=True)
        ]

    def _draft_lengths(
        self, rows: Sequence[Row], drafts: Sequence[Draft], num_prompt_tokens: int
    ) -> list[int]:
        """How much of each row's draft is verified."""
        if self._budget is None:
            return [len(draft.token_ids) for draft in drafts]
        candidates = [
            Candidate(draft, row.num_left, row.may_stop)
            for row, draft in zip(rows, drafts, strict=True)
        ]
        return self._budget.choose(candidates, num_prompt_tokens, self.num_waiting)

    def _verify(self, windows: list[_Window]) -> StepLogits:
        """Run the target model once over all windows."""
        token_ids: list[int] = []
        rows: list[int] = []
        positions: list[int] = []
        wanted: list[int] = []
        for window in windows:
            start, length = window.row.num_cached, len(window.token_ids)
            token_ids += window.token_ids
            rows += [window.row.slot] * length
            positions += range(start, start + length)
            wanted += range(len(token_ids) - window.num_logits, len(token_ids))
        columns = (token_ids, rows, positions, wanted)
        batch = StepBatch(*(torch.tensor(column, dtype=torch.int64) for column in columns))
        logits_nV = self._model.forward(batch, self._cache)
        if logits_nV.dtype == torch.bfloat16:  # numpy has no such type.
            logits_nV = logits_nV.float()
        return StepLogits(logits_nV.numpy(force=True))

    def _accept(self, window: _Window, logits: StepLogits, at: int) -> None:
        """Take over what the pass says about one row, and roll its cache back to that."""
        row = window.row
        row.num_cached += len(window.token_ids)
        if not window.num_logits:
            return
        try:
            draft = window.draft.token_ids[: window.num_drafted]
            acceptance = accept(draft, lambda j: row.next_token(logits, at + j), row.ends)
        except NonFiniteLogitsError as error:
            row.fail(error)
            return
        row.commit(acceptance, window.num_drafted)
        self.tally.count_tokens(
            len(acceptance.token_ids), window.num_drafted, acceptance.num_accepted
        )
        if self._budget is not None:
            self._budget.observe(window.draft, acceptance.token_ids, ended=row.has_stopped)

    def _retire(self) -> list[Completion]:
        """Take finished rows out of the batch."""
        finished = [row for row in self._rows if row.is_finished]
        self._rows = [row for row in self._rows if not row.is_finished]
        self._free_slots += [row.slot for row in finished]
        return [
            row.complete(self._detokenizer, self._limits.num_spec_tokens, time.monotonic())
            for row in finished
        ]
