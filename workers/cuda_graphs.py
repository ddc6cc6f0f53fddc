"""Small passes as CUDA graphs: what they cost on a GPU is the launching of kernels, hundreds a pass.

A graph does the same again on the same memory, so a pass is made to fit one of a few: it is padded to a
number of tokens and to a length of cache, and each of its tokens attends by itself. Padding repeats the
pass's last token, which writes to the cache what that token writes.
"""

import logging
from collections.abc import Callable
from weakref import WeakKeyDictionary

import torch

from workers.backend import Forward, KVCache, StepBatch

Replay = Callable[[], torch.Tensor]
Record = Callable[[Replay], Replay]

_LOGGER = logging.getLogger(__name__)
_NUM_TOKENS = (8, 16, 32, 64)
_LEAST_LENGTH = 64
_MOST_POSITIONS = 2**17  # Tokens times length: what each token reads, it reads by itself.
_NUM_WARM_UPS = 2


class PassGraphs:
    """A model's forward pass, recorded once for each size and played again after that.

    A pass too large for that, or every pass where recording fails, is run as it is.
    """

    def __init__(self, forward: Forward, device: torch.device, record: Record) -> None:
        """`record` runs what it is given, and returns what does the same again, to the same tensor."""
        self._forward, self._device, self._record = forward, device, record
        # Recordings are bound to a cache's memory, and go with it.
        self._recorded: WeakKeyDictionary[KVCache, dict[tuple[int, int], _RecordedPass]] = (
            WeakKeyDictionary()
        )
        self._works = True

    @torch.inference_mode()
    def __call__(self, batch: StepBatch, cache: KVCache) -> torch.Tensor:
        """The logits [n, V] of `TargetModel.forward`; those of a recorded pass until the next one."""
        size = _size_of(batch, cache) if self._works else None
        if size is None:
            return self._forward(batch.to(self._device), cache)
        recorded = self._recorded.setdefault(cache, {})
        if size not in recorded:
            inputs = _FixedBatch(*size, self._device)
            inputs.fill_(batch)
            try:
                recorded[size] = _RecordedPass(
                    inputs, self._record(lambda: self._forward(inputs, cache))
                )
            except RuntimeError as error:
                _LOGGER.warning("passes are not recorded as CUDA graphs: %s", error)
                self._works = False
                return self._forward(batch.to(self._device), cache)
        return recorded[size].play(batch)


class CudaGraphs:
    """Records on a CUDA device; all recordings share one pool of memory, as none outlives a pass."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Replay) -> Replay:
        """Run it beside the stream, as torch asks for, then record it; raises RuntimeError."""
        aside, here = torch.cuda.Stream(), torch.cuda.current_stream()
        aside.wait_stream(here)
        with torch.cuda.stream(aside):
            for _ in range(_NUM_WARM_UPS):
                run()
        here.wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = run()

        def replay() -> torch.Tensor:
            graph.replay()
            return result

        return replay


class _RecordedPass:
    def __init__(self, inputs: "_FixedBatch", replay: Replay) -> None:
        self._inputs, self._replay = inputs, replay

    def play(self, batch: StepBatch) -> torch.Tensor:
        self._inputs.fill_(batch)
        return self._replay()[: len(batch.logit_indices)]


class _FixedBatch(StepBatch):
    """A pass's place on the device: what stands in it changes, its shapes do not."""

    _columns: torch.Tensor

    def __init__(self, num_tokens: int, length: int, device: torch.device) -> None:
        columns = torch.zeros(4, num_tokens, dtype=torch.int64, device=device)
        super().__init__(*columns)
        each_alone = torch.arange(num_tokens, device=device)[:, None]
        self.__dict__ |= {"_columns": columns, "windows": [each_alone], "longest": length}

    def fill_(self, batch: StepBatch) -> None:
        """Take in a pass of as many tokens, or fewer."""
        num_tokens = self._columns.shape[1]
        given = (batch.token_ids, batch.rows, batch.positions, batch.logit_indices)
        self._columns.copy_(torch.stack([_padded(column, num_tokens) for column in given]))


def _padded(column: torch.Tensor, length: int) -> torch.Tensor:
    """A column with its last entry repeated; of none, zeros."""
    last = column[-1:] if len(column) else column.new_zeros(1)
    return torch.cat([column, last.expand(length - len(column))])


def _size_of(batch: StepBatch, cache: KVCache) -> tuple[int, int] | None:
    """The tokens and the length that a pass is padded to; None if it is too large."""
    num_tokens = next((n for n in _NUM_TOKENS if n >= len(batch.token_ids)), None)
    length = _LEAST_LENGTH
    while length < batch.longest:
        length *= 2
    if num_tokens is None or num_tokens * length > _MOST_POSITIONS:
        return None
    return num_tokens, min(length, cache.max_len)
