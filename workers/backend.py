"""What the target model asks of a device.

A backend's results for a token must not depend on which other tokens share the pass: that is what
makes a verified draft equal to plain decoding. `workers.torch_backend` is the reference, for any dtype
torch computes in; `workers.cpu` holds the promise bit by bit.

Legend: T tokens of a pass, H query heads, G key/value heads, D head size, K inputs, N outputs,
J width of a fused projection, L positions of a cache row, R rows of the cache.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch

from quant.architecture import Architecture
from quant.int8 import MAX_CODE


@dataclass(frozen=True)
class LinearWeights:
    """One linear: float weights [N, K], or packed int8 codes with a float32 scale [N] an output.

    `max_code` bounds the activation codes of an int8 linear (127: W8A8). See `quant.int8`.
    """

    weight: torch.Tensor
    scale_N: torch.Tensor | None = None
    bias_N: torch.Tensor | None = None
    max_code: int = MAX_CODE


class Linear(Protocol):
    """A linear on its device, together with what comes before and after it in a decoder."""

    def __call__(self, x_TK: torch.Tensor) -> torch.Tensor:
        """The outputs [T, N]."""
        ...

    def of_norm(self, x_TK: torch.Tensor, gain_K: torch.Tensor, eps: float) -> torch.Tensor:
        """The outputs [T, N] for x / rms(x) * gain."""
        ...

    def add_to_(self, x_TN: torch.Tensor, h_TK: torch.Tensor) -> None:
        """Add the outputs for h to x, in place."""
        ...

    def add_silu_to_(self, x_TN: torch.Tensor, gate_up_TJ: torch.Tensor) -> None:
        """Add the outputs for silu(gate) * up to x, in place; gate_up is [T, 2 K], gate first."""
        ...


@dataclass(frozen=True)
class Heads:
    """How one layer reads its fused projection [T, (H + 2 G) D], and attends.

    Attributes:
        layer: its index, which is where its keys and values lie in the cache.
        window: positions a query sees, its own included; 0: all.
        q_gain: [D], the norm of each query head; None: no norm.
        k_gain: the same for key heads.
        eps: of these norms.
        cos: [L, D / 2], the rotary table; pairs are (i, i + D / 2), as Hugging Face lays them out.
        sin: the same.
    """

    layer: int
    window: int
    q_gain: torch.Tensor | None
    k_gain: torch.Tensor | None
    eps: float
    cos: torch.Tensor
    sin: torch.Tensor

    @property
    def head_dim(self) -> int:
        """D."""
        return 2 * self.cos.shape[1]


@dataclass(frozen=True, eq=False)
class KVCache:
    """Keys and values [layers, R, G, L, D] of every row; how much of a row counts is not its affair.

    A backend may keep the keys in an order of its own, layers and rows first.
    """

    keys: torch.Tensor
    values: torch.Tensor

    @property
    def num_rows(self) -> int:
        """Rows, each with room for `max_len` positions."""
        return self.keys.shape[1]

    @property
    def max_len(self) -> int:
        """Positions a row can hold."""
        return self.values.shape[3]

    @property
    def nbytes(self) -> int:
        """Bytes asked for (untouched pages take none)."""
        return self.keys.nbytes + self.values.nbytes

    def copy_prefix_(self, source: int, target: int, length: int) -> None:
        """Give one row the first `length` positions of another."""
        if source != target:
            for part in (self.keys, self.values):
                part[:, target, :, :length] = part[:, source, :, :length]


@dataclass(frozen=True)
class StepBatch:
    """The tokens of one pass, rows ragged and concatenated: no padding anywhere.

    Attributes:
        token_ids: [T] int64.
        rows: [T] int64, the cache row of each token.
        positions: [T] int64; a token sees positions 0..its own of its row, those of this pass
            included. Within a row they must ascend.
        logit_indices: [n] int64, the tokens whose logits are wanted.
    """

    token_ids: torch.Tensor
    rows: torch.Tensor
    positions: torch.Tensor
    logit_indices: torch.Tensor

    def to(self, device: torch.device) -> "StepBatch":
        """The pass on a device."""
        if self.rows.device == device:
            return self
        columns = (self.token_ids, self.rows, self.positions, self.logit_indices)
        return StepBatch(*(column.to(device) for column in columns))

    @cached_property
    def longest(self) -> int:
        """Positions of the longest row, those of this pass included."""
        return int(self.positions.max()) + 1

    @cached_property
    def windows(self) -> list[torch.Tensor]:
        """The tokens by row: for each number n of tokens that rows have, [rows, n] indices of tokens."""
        of_row: defaultdict[int, list[int]] = defaultdict(list)
        for token, row in enumerate(self.rows.tolist()):
            of_row[row].append(token)
        of_length: defaultdict[int, list[list[int]]] = defaultdict(list)
        for tokens in of_row.values():
            of_length[len(tokens)].append(tokens)
        return [torch.tensor(group, device=self.rows.device) for group in of_length.values()]


Forward = Callable[[StepBatch, KVCache], torch.Tensor]


class Attention(Protocol):
    """The attention of one layer on its device."""

    def __call__(self, qkv_TJ: torch.Tensor, cache: KVCache, batch: StepBatch) -> torch.Tensor:
        """Write the pass's keys and values to the cache, then attend causally over each token's row.

        Returns:
            [T, H D].
        """
        ...


class Backend(Protocol):
    """The device operations of the target model."""

    dtype: torch.dtype
    device: torch.device

    def linear(self, weights: LinearWeights) -> Linear:
        """Prepare a linear."""
        ...

    def attention(self, heads: Heads) -> Attention:
        """Prepare a layer's attention."""
        ...

    def new_cache(self, architecture: Architecture, num_rows: int, max_len: int) -> KVCache:
        """Allocate a cache; pages are touched only as rows grow."""
        ...

    def launcher(self, forward: Forward) -> Forward:
        """How a model's pass, given batches of any device, is best run on this one."""
        ...
