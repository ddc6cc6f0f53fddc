"""One row of the batch: a request on its way to a completion."""

import time
from collections.abc import Iterable

from workers.acceptance import Acceptance
from workers.proposer import Draft, Proposer
from workers.request import Completion, Request, TokenLogprobs
from workers.sampling import Sampler, StepLogits, TokenHistory
from workers.stats import AcceptanceStats
from workers.stopping import Detokenizer, End, StopChecker


class Row:
    """The state of one request: its tokens, how many of them are cached, and how it ends.

    Between passes `num_cached` is at most the number of tokens less one: the newest token's keys and
    values are computed by the pass that verifies its successors. What lies behind that length in the
    cache is never read, so rolling back a rejected draft is setting a number.
    """

    def __init__(
        self,
        request: Request,
        slot: int,
        proposer: Proposer,
        detokenizer: Detokenizer,
        eos_token_ids: Iterable[int],
        max_len: int,
    ) -> None:
        params = request.params
        self.request, self.slot = request, slot
        self.token_ids = list(request.prompt_token_ids)
        self.num_cached = 0
        self._max_len = max_len
        self._num_prompt = len(self.token_ids)
        self._stopping = StopChecker(
            params, eos_token_ids, detokenizer, min(params.max_tokens, max_len - self._num_prompt)
        )
        self._history = TokenHistory(self.token_ids)
        self._sampler = Sampler(
            params,
            request.seed,
            request.sample_idx,
            self._history,
            self._stopping.end_token_ids,
        )
        self._proposer = proposer
        self._proposer.extend(self.token_ids)
        self._logprobs: list[TokenLogprobs] = []
        self._steps: list[tuple[int, int]] = []
        self._end: End | None = None
        self._error: Exception | None = None
        self._started = time.monotonic()

    @property
    def num_generated(self) -> int:
        """Tokens of the answer so far."""
        return len(self.token_ids) - self._num_prompt

    @property
    def num_left(self) -> int:
        """The most tokens the answer may still get."""
        return self._stopping.max_tokens - self.num_generated

    @property
    def may_stop(self) -> bool:
        """Whether the answer may end before that."""
        return bool(self._stopping.end_token_ids or self.request.params.stop)

    @property
    def has_stopped(self) -> bool:
        """Whether the answer ended by itself."""
        return self._end is not None and self._end.finish_reason == "stop"

    @property
    def pending_prompt(self) -> list[int]:
        """Prompt tokens that no pass has computed yet; empty once the row decodes."""
        return self.token_ids[self.num_cached :] if self.num_cached < self._num_prompt else []

    @property
    def is_prefilling(self) -> bool:
        """Whether prompt tokens are still to be computed."""
        return not self.is_finished and self.num_cached < self._num_prompt

    @property
    def is_finished(self) -> bool:
        """Whether the row has its answer, or the reason why it has none."""
        return self._end is not None or self._error is not None

    def propose(self, num_spec_tokens: int) -> Draft:
        """Draft, leaving room in the answer and in the cache for every drafted token and one more."""
        room = min(
            num_spec_tokens,
            self.num_left - 1,
            self._max_len - len(self.token_ids),
        )
        return self._proposer.propose(room) if room > 0 else Draft()

    def next_token(self, logits: StepLogits, index: int) -> int:
        """The target's next token, from the logits at `index` of the pass."""
        token_id = self._sampler.next_token(logits, index, self.num_generated)
        if self.request.params.logprobs is not None:
            self._logprobs.append(self._sampler.logprobs(logits, index, token_id))
        return token_id

    def ends(self, token_id: int) -> bool:
        """Make the token part of the answer; True if the answer ends with it."""
        self.token_ids.append(token_id)
        self._history.append(token_id)
        self._end = self._stopping.check(token_id)
        return self._end is not None

    def commit(self, acceptance: Acceptance, num_drafted: int) -> None:
        """Close a verify step: count it, and cut the cache back to the accepted tokens."""
        self._steps.append((num_drafted, acceptance.num_accepted))
        self._proposer.extend(acceptance.token_ids)
        self.num_cached = len(self.token_ids) - 1

    def fail(self, error: Exception) -> None:
        """End the row without an answer; its part of the cache is of no use to others."""
        self._error = error
        self.num_cached = 0

    def complete(self, detokenizer: Detokenizer, num_spec_tokens: int, now: float) -> Completion:
        """The row's completion; only for a finished row."""
        stats = AcceptanceStats.of_steps(self._steps, num_spec_tokens)
        seconds = now - self._started
        if self._end is None:
            error = str(self._error), type(self._error).__name__.removesuffix("Error")
            return Completion(
                self.request,
                "error",
                seconds=seconds,
                stats=stats,
                error=error[0],
                error_type=error[1],
            )
        generated = tuple(self.token_ids[self._num_prompt :])
        text = detokenizer.decode(generated)
        logprobs = None if self.request.params.logprobs is None else tuple(self._logprobs)
        return Completion(
            request=self.request,
            finish_reason=self._end.finish_reason,
            token_ids=generated,
            text=text if self._end.cut is None else text[: self._end.cut],
            stop_reason=self._end.stop_reason,
            logprobs=logprobs,
            stats=stats,
            seconds=seconds,
        )
