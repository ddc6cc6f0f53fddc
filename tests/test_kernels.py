"""Every operation of the CPU backend: right against float64, and the same bits in any company."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from quant.architecture import Architecture
from quant.decoder import rotate as rotate_by_torch
from quant.int8 import MAX_WIDE_CODE, pack, quantize_rows
from tests.tiny import num_threads
from workers import attention as attention_kernels
from workers import kernels
from workers.backend import Attention, Heads, KVCache, Linear, LinearWeights, StepBatch
from workers.cpu import CellCache, CpuBackend
from workers.torch_backend import TorchBackend

BACKEND = CpuBackend()
MANY = settings(
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=20,
    phases=(Phase.explicit, Phase.generate),
)
NAN, INF = math.nan, math.inf
RowOperation = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    with num_threads(1):
        yield


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equality of the bits: 0 and -0 differ, NaN equals the same NaN."""
    return a.shape == b.shape and torch.equal(a.view(torch.int32), b.view(torch.int32))


def int8_linear(num_outputs: int, num_inputs: int, max_code: int = 127) -> Linear:
    codes_NK, scale_N = quantize_rows(randn(num_outputs, num_inputs, seed=1))
    bias_N = randn(num_outputs, seed=2)
    return BACKEND.linear(LinearWeights(pack(codes_NK), scale_N, bias_N, max_code))


def bf16_linear(num_outputs: int, num_inputs: int) -> Linear:
    weight_NK = randn(num_outputs, num_inputs, seed=1).bfloat16()
    return BACKEND.linear(LinearWeights(weight_NK, bias_N=randn(num_outputs, seed=2)))


# --- The kernels as functions of tensors, called as the backend calls them ---


def array(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().numpy()


def bits(tensor: torch.Tensor) -> np.ndarray:
    return tensor.view(torch.uint16).numpy()


def silu_mul(gate_up_TJ: torch.Tensor) -> torch.Tensor:
    out_TI = torch.empty(len(gate_up_TJ), gate_up_TJ.shape[1] // 2)
    kernels.silu_mul(array(gate_up_TJ), out_TI.numpy())
    return out_TI


def rms_norm(x: torch.Tensor, gain: torch.Tensor, eps: float) -> torch.Tensor:
    """The norm of rows [T, K]; or of every head of [T, H, D], as attention takes it of queries."""
    if x.dim() == 3:
        heads = unrotated(x.shape[2], max_len=1, q_gain=gain, eps=eps)
        batch = make_batch(list(range(len(x))), [0] * len(x))
        return prepare(x.flatten(1), heads, no_cache(len(x), 1, x.shape[2]), batch)
    out_TK = torch.empty(x.shape)
    kernels.rms_norm(array(x), array(gain), eps, out_TK.numpy())
    return out_TK


def rotate(x_THD: torch.Tensor, cos_TC: torch.Tensor, sin_TC: torch.Tensor) -> torch.Tensor:
    """Queries rotated, each by a line of its own of the table."""
    num_tokens, _, head_dim = x_THD.shape
    heads = replace(unrotated(head_dim, max_len=num_tokens), cos=cos_TC, sin=sin_TC)
    batch = make_batch([0] * num_tokens, list(range(num_tokens)))
    return prepare(x_THD.flatten(1), heads, no_cache(1, num_tokens, head_dim), batch)


def store(
    cache: KVCache, layer: int, k_TGD: torch.Tensor, v_TGD: torch.Tensor, batch: StepBatch
) -> None:
    """Keys and values written to the cache as they are."""
    heads = replace(unrotated(k_TGD.shape[2], cache.max_len), layer=layer)
    prepare(torch.cat([k_TGD, v_TGD], dim=1).flatten(1), heads, cache, batch)


def prepare(qkv_TJ: torch.Tensor, heads: Heads, cache: KVCache, batch: StepBatch) -> torch.Tensor:
    """Queries [T, H, D] normed and rotated, keys and values written to the cache."""
    num_kv_heads, padded_dim = cache.values.shape[2], cache.values.shape[4]
    num_heads = qkv_TJ.shape[1] // heads.head_dim - 2 * num_kv_heads
    q_THP = torch.full((len(qkv_TJ), num_heads, padded_dim), NAN)
    no_gain = torch.empty(0)
    attention_kernels.prepare_heads(
        array(qkv_TJ),
        array(no_gain if heads.q_gain is None else heads.q_gain),
        array(no_gain if heads.k_gain is None else heads.k_gain),
        heads.eps,
        array(heads.cos),
        array(heads.sin),
        array(batch.rows),
        array(batch.positions),
        heads.layer,
        bits(cache.keys),
        bits(cache.values),
        q_THP.numpy(),
    )
    assert not q_THP[..., heads.head_dim :].any()  # The padding adds nothing to a score.
    return q_THP[..., : heads.head_dim]


def attend(
    q_THD: torch.Tensor, cache: KVCache, layer: int, batch: StepBatch, window: int
) -> torch.Tensor:
    """Attention [T, H, D] over what the cache holds."""
    head_dim, padded_dim = q_THD.shape[2], cache.values.shape[4]
    q_THP = torch.nn.functional.pad(q_THD, (0, padded_dim - head_dim))
    out_THP = torch.empty(q_THP.shape)
    attention_kernels.attend(
        array(q_THP),
        array(batch.rows),
        array(batch.positions),
        layer,
        bits(cache.keys),
        bits(cache.values),
        window,
        np.float32(1 / math.sqrt(head_dim)),
        out_THP.numpy(),
    )
    return out_THP[..., :head_dim]


def unrotated(
    head_dim: int, max_len: int, q_gain: torch.Tensor | None = None, eps: float = 1e-6
) -> Heads:
    """Heads of layer 0 that are turned by no angle and see all."""
    cos_LC = torch.ones(max_len, head_dim // 2)
    return Heads(0, 0, q_gain, None, eps, cos_LC, torch.zeros_like(cos_LC))


def turned(
    head_dim: int, max_len: int, *, layer: int = 0, window: int = 0, gains: bool = False
) -> Heads:
    """Heads with angles and gains of their own."""
    angles_LC = 10 * randn(max_len, head_dim // 2, seed=8)
    q_gain, k_gain = (randn(head_dim, seed=seed) if gains else None for seed in (9, 10))
    return Heads(layer, window, q_gain, k_gain, 1e-6, angles_LC.cos(), angles_LC.sin())


def no_cache(num_rows: int, max_len: int, head_dim: int) -> KVCache:
    """A cache without key/value heads: what is prepared are queries."""
    padded_dim, num_cells = head_dim + -head_dim % 32, -(-max_len // 32)
    keys = torch.empty(1, num_rows, 0, num_cells, padded_dim, 32, dtype=torch.bfloat16)
    return CellCache(keys, keys.view(1, num_rows, 0, num_cells * 32, padded_dim))


def make_cache(num_rows: int, num_heads: int, max_len: int, head_dim: int) -> CellCache:
    """A full cache of two layers; heads are wider and rows longer than asked, with zeros."""
    architecture = Architecture(
        model_type="llama",
        vocab_size=8,
        hidden_size=64,
        intermediate_size=64,
        num_layers=2,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        norm_eps=1e-6,
        max_position_embeddings=max_len,
        tied_head=False,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        qk_norm=False,
        rope_inv_freq=(1.0,) * (head_dim // 2),
        rope_scaling=1.0,
        windows=(0, 0),
        eos_token_ids=(),
    )
    cache = BACKEND.new_cache(architecture, num_rows, max_len)
    assert isinstance(cache, CellCache)
    shape = (2, num_rows, num_heads, max_len, head_dim)
    keys, values = torch.zeros(cache.values.shape), torch.zeros(cache.values.shape)
    for seed, tensor in enumerate((keys, values)):
        tensor[..., :max_len, :head_dim] = randn(*shape, seed=5 + seed)
    return in_cells(keys.bfloat16(), values.bfloat16())


def in_cells(keys_by_position: torch.Tensor, values: torch.Tensor) -> CellCache:
    """A cache of these keys and values [layers, R, G, L, D]."""
    keys = keys_by_position.unflatten(3, (-1, 32)).swapaxes(4, 5).contiguous()
    return CellCache(keys, values)


def make_batch(rows: list[int], positions: list[int]) -> StepBatch:
    nothing = torch.zeros(len(rows), dtype=torch.long)
    rows_T, positions_T = (torch.tensor(numbers, dtype=torch.long) for numbers in (rows, positions))
    return StepBatch(nothing, rows_T, positions_T, nothing)


# --- Operations whose input is one row per token ---


def norm(size: int) -> RowOperation:
    gain = randn(size, seed=3)
    return lambda x: rms_norm(x, gain, 1e-6)


def of_norm(linear: Linear, size: int) -> RowOperation:
    gain = randn(size, seed=3)
    return lambda x: linear.of_norm(x, gain, 1e-6)


def added(add: Callable[[torch.Tensor, torch.Tensor], None], num_inputs: int) -> RowOperation:
    """What is added to a stream whose rows come behind the inputs in one tensor."""

    def operation(rows: torch.Tensor) -> torch.Tensor:
        stream = rows[:, num_inputs:].clone(memory_format=torch.contiguous_format)
        add(stream, rows[:, :num_inputs])
        return stream

    return operation


def attention(
    num_heads: int, num_kv_heads: int, head_dim: int, *, window: int, gains: bool
) -> RowOperation:
    """Each token at position 7 of a cache row of its own; all rows hold the same before."""
    mixer = BACKEND.attention(turned(head_dim, 8, layer=1, window=window, gains=gains))
    one_row = make_cache(1, num_kv_heads, 8, head_dim)

    def operation(qkv_TJ: torch.Tensor) -> torch.Tensor:
        count = len(qkv_TJ)
        keys, values = one_row.keys_by_position, one_row.values
        rows = in_cells(*(part.repeat(1, count, 1, 1, 1) for part in (keys, values)))
        return mixer(qkv_TJ, rows, make_batch(list(range(count)), [7] * count))

    return operation


INT8_ODD, BF16_ODD = int8_linear(67, 41), bf16_linear(67, 41)
# (operation, shape of a token's row)
ROW_OPERATIONS: dict[str, tuple[RowOperation, tuple[int, ...]]] = {
    "int8": (int8_linear(67, 96), (96,)),
    "int8-padded": (int8_linear(130, 41), (41,)),
    "int8-head": (int8_linear(33, 64, max_code=MAX_WIDE_CODE), (64,)),
    "int8-of_norm": (of_norm(INT8_ODD, 41), (41,)),
    "int8-add_to": (added(INT8_ODD.add_to_, 41), (41 + 67,)),
    "int8-add_silu_to": (added(INT8_ODD.add_silu_to_, 82), (82 + 67,)),
    "bf16": (bf16_linear(67, 96), (96,)),
    "bf16-padded": (bf16_linear(130, 41), (41,)),
    "bf16-of_norm": (of_norm(BF16_ODD, 41), (41,)),
    "bf16-add_to": (added(BF16_ODD.add_to_, 41), (41 + 67,)),
    "bf16-add_silu_to": (added(BF16_ODD.add_silu_to_, 82), (82 + 67,)),
    "norm": (norm(64), (64,)),
    "norm-odd": (norm(37), (37,)),
    "head-norm": (norm(16), (4, 16)),
    "head-norm-odd": (norm(10), (3, 10)),
    "silu_mul": (silu_mul, (192,)),
    "silu_mul-odd": (silu_mul, (74,)),
    "attention": (attention(4, 2, 16, window=0, gains=True), (8 * 16,)),
    "attention-odd": (attention(7, 1, 10, window=3, gains=False), (9 * 10,)),
}
EVERY_ROW_OPERATION = pytest.mark.parametrize(
    ("operation", "shape"), ROW_OPERATIONS.values(), ids=ROW_OPERATIONS
)


# --- Values, against float64 ---


@pytest.mark.parametrize("num_rows", [1, 3, 4, 17, 65])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(2, 16), (67, 40), (129, 200), (64, 896)])
@pytest.mark.parametrize("biased", [True, False])
def test_bf16_linear(num_rows: int, num_outputs: int, num_inputs: int, biased: bool) -> None:
    x_MK, weight_NK = randn(num_rows, num_inputs), randn(num_outputs, num_inputs, seed=1).bfloat16()
    bias_N = randn(num_outputs, seed=2) if biased else None
    got = BACKEND.linear(LinearWeights(weight_NK, bias_N=bias_N))(x_MK)
    assert got.dtype == torch.float32
    expected = x_MK.bfloat16().double() @ weight_NK.double().T
    if bias_N is not None:
        expected += bias_N.double()
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(2, 16), (67, 40), (96, 896)])
def test_int8_linear_is_near_the_float_product(num_outputs: int, num_inputs: int) -> None:
    # Exactness has its own tests; here the whole: quantized, multiplied, scaled, biased.
    x_MK, weight_NK = randn(9, num_inputs), randn(num_outputs, num_inputs, seed=1)
    bias_N = randn(num_outputs, seed=2)
    codes_NK, scale_N = quantize_rows(weight_NK)
    got = BACKEND.linear(LinearWeights(pack(codes_NK), scale_N, bias_N))(x_MK).double()
    expected = x_MK.double() @ weight_NK.double().T + bias_N.double()
    # Half a step of at most 5 / 127 on either side, over K products of size 1: 3 % is generous.
    assert (got - expected).norm() < 0.03 * expected.norm()


FUSED_LINEARS = pytest.mark.parametrize(
    ("make_linear", "num_outputs", "num_inputs"),
    [
        (make_linear, num_outputs, num_inputs)
        for make_linear in (int8_linear, bf16_linear)
        for num_outputs, num_inputs in ((67, 41), (3, 7), (65, 16), (96, 64))
    ],
)


@FUSED_LINEARS
@pytest.mark.parametrize("num_rows", [*range(1, 10), 67])
def test_a_linear_of_a_norm(
    make_linear: Callable[[int, int], Linear], num_outputs: int, num_inputs: int, num_rows: int
) -> None:
    linear = make_linear(num_outputs, num_inputs)
    x_MK, gain_K = 3 * randn(num_rows, num_inputs), randn(num_inputs, seed=3)
    for eps in (1e-6, 0.5):
        expected_MN = linear(rms_norm(x_MK, gain_K, eps))
        assert expected_MN.shape == (num_rows, num_outputs)
        assert same_bits(linear.of_norm(x_MK, gain_K, eps), expected_MN)


@FUSED_LINEARS
@pytest.mark.parametrize("num_rows", [*range(1, 10), 67])
def test_a_linear_is_added_once(
    make_linear: Callable[[int, int], Linear], num_outputs: int, num_inputs: int, num_rows: int
) -> None:
    # Once also where tiles overlap: bfloat16 ones do at the last of an odd number of outputs.
    linear = make_linear(num_outputs, num_inputs)
    x_MN, h_MK = randn(num_rows, num_outputs, seed=3), randn(num_rows, num_inputs)
    expected_MN = x_MN + linear(h_MK)
    assert not torch.equal(expected_MN[:, -1], x_MN[:, -1])
    linear.add_to_(x_MN, h_MK)
    assert same_bits(x_MN, expected_MN)
    linear.add_to_(x_MN, h_MK)
    assert same_bits(x_MN, expected_MN + linear(h_MK))


@FUSED_LINEARS
@pytest.mark.parametrize("num_rows", [*range(1, 10), 67])
def test_a_linear_of_silu_is_added_once(
    make_linear: Callable[[int, int], Linear], num_outputs: int, num_inputs: int, num_rows: int
) -> None:
    linear = make_linear(num_outputs, num_inputs)
    x_MN, gate_up_MJ = randn(num_rows, num_outputs, seed=3), randn(num_rows, 2 * num_inputs)
    expected_MN = x_MN + linear(silu_mul(gate_up_MJ))
    assert not torch.equal(expected_MN[:, -1], x_MN[:, -1])
    linear.add_silu_to_(x_MN, gate_up_MJ)
    assert same_bits(x_MN, expected_MN)


@FUSED_LINEARS
@pytest.mark.parametrize("num_rows", [1, 6])
def test_the_forms_of_a_linear_agree_with_torch(
    make_linear: Callable[[int, int], Linear], num_outputs: int, num_inputs: int, num_rows: int
) -> None:
    weight_NK, bias_N = randn(num_outputs, num_inputs, seed=1), randn(num_outputs, seed=2)
    weights = LinearWeights(weight_NK.bfloat16().float(), bias_N=bias_N)
    if make_linear is int8_linear:
        codes_NK, scale_N = quantize_rows(weight_NK)
        weights = LinearWeights(pack(codes_NK), scale_N, bias_N)
    ours, theirs = make_linear(num_outputs, num_inputs), TorchBackend(torch.float32).linear(weights)
    x_MK, gain_K = randn(num_rows, num_inputs), randn(num_inputs, seed=3)
    gate_up_MJ = randn(num_rows, 2 * num_inputs, seed=4)
    results = []
    for linear in (ours, theirs):
        added_MN, mixed_MN = (randn(num_rows, num_outputs, seed=5) for _ in range(2))
        linear.add_to_(added_MN, x_MK)
        linear.add_silu_to_(mixed_MN, gate_up_MJ)
        results.append((linear(x_MK), linear.of_norm(x_MK, gain_K, 1e-6), added_MN, mixed_MN))
    # What is left: activations rounded to bfloat16, or codes that fall the other way.
    for got_MN, expected_MN in zip(*results, strict=True):
        assert (got_MN - expected_MN).norm() < 1e-2 * expected_MN.norm()


@pytest.mark.parametrize("shape", [(1, 64), (5, 64), (3, 37), (4, 4, 16), (3, 2, 10), (2, 1536)])
@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_rms_norm(shape: tuple[int, ...], eps: float) -> None:
    x, gain = 5 * randn(*shape), randn(shape[-1], seed=1)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * gain.double()
    got = rms_norm(x, gain, eps)
    torch.testing.assert_close(got.double(), expected, rtol=3e-6, atol=1e-6)


def test_rms_norm_by_hand() -> None:
    # mean(9, 16, 0, 0) = 6.25 = 2.5 ** 2
    got = rms_norm(torch.tensor([[3.0, -4.0, 0.0, 0.0]]), torch.tensor([1.0, 5, 2, 2]), 0.0)
    torch.testing.assert_close(got, torch.tensor([[1.2, -8.0, 0.0, 0.0]]))
    zero = rms_norm(torch.zeros(1, 4), torch.ones(4), 1e-6)
    assert zero.tolist() == [[0.0] * 4]


@EVERY_ROW_OPERATION
def test_a_pass_of_no_rows(operation: RowOperation, shape: tuple[int, ...]) -> None:
    got, one = operation(torch.empty(0, *shape)), operation(randn(1, *shape))
    assert got.shape == (0, *one.shape[1:])


def test_no_heads_to_rotate() -> None:
    assert rotate(torch.empty(0, 4, 16), torch.empty(0, 8), torch.empty(0, 8)).shape == (0, 4, 16)


def test_silu_mul() -> None:
    gate = torch.cat([torch.linspace(-80, 80, 3201), torch.tensor([0.0, 1e-30, -1e-30])])
    up = 1 + randn(len(gate)).abs()
    got = silu_mul(torch.cat([gate, up])[None])[0].double()
    wide = gate.double()
    expected = wide / (1 + torch.exp(-wide)) * up.double()
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-35)


def test_silu_mul_far_out() -> None:
    gate = torch.tensor([-3e38, -1e4, -100.0, 100.0, 1e4, 3e38])
    got = silu_mul(torch.cat([gate, torch.ones(6)])[None])[0]
    # silu is 0 on the far left (within 2 of the smallest normal floats) and the identity right.
    torch.testing.assert_close(got[1:3], torch.zeros(2), rtol=0, atol=1e-33)
    torch.testing.assert_close(got[3:], gate[3:], rtol=1e-6, atol=0)
    assert abs(got[0]) < 4  # x * exp(x), the exponent held at the edge of the range


def test_rotate() -> None:
    x_THD, angles = randn(5, 3, 20), 10 * randn(5, 10, seed=1)
    got = rotate(x_THD, angles.cos(), angles.sin()).double()
    # Pairs (i, i + D / 2) as complex numbers, turned by the angle.
    pairs = torch.complex(*x_THD.double().split(10, dim=-1))
    turned = pairs * torch.polar(torch.ones(5, 1, 10).double(), angles.double()[:, None])
    torch.testing.assert_close(got, torch.cat([turned.real, turned.imag], -1), rtol=1e-5, atol=1e-6)


def attention_by_torch(
    q_THD: torch.Tensor, cache: CellCache, layer: int, batch: StepBatch, window: int
) -> torch.Tensor:
    """Softmax attention written out in float64, token by token."""
    out_THD = torch.empty(q_THD.shape, dtype=torch.float64)
    repeats, head_dim = q_THD.shape[1] // cache.values.shape[2], q_THD.shape[2]
    keys = cache.keys_by_position
    for t, (row, last) in enumerate(
        zip(batch.rows.tolist(), batch.positions.tolist(), strict=True)
    ):
        seen = [p for p in range(last + 1) if not window or p > last - window]
        for head in range(q_THD.shape[1]):
            keys_LD = keys[layer, row, head // repeats, seen, :head_dim].double()
            values_LD = cache.values[layer, row, head // repeats, seen, :head_dim].double()
            scores_L = keys_LD @ q_THD[t, head].double() / math.sqrt(head_dim)
            out_THD[t, head] = scores_L.softmax(0) @ values_LD
    return out_THD


ROWS, POSITIONS = [3, 0, 3, 1, 0, 3, 2], [0, 7, 1, 38, 8, 5, 18]
SCATTERED, PROMPT = (ROWS, POSITIONS), ([2] * 35, list(range(5, 40)))


@pytest.mark.parametrize(("rows", "positions"), [SCATTERED, PROMPT], ids=["scattered", "prompt"])
@pytest.mark.parametrize("window", [0, 1, 2, 8, 19, 1000])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"), [(4, 2, 16), (6, 6, 10), (7, 1, 64), (12, 2, 128)]
)
def test_attend(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    window: int,
    rows: list[int],
    positions: list[int],
) -> None:
    cache = make_cache(4, num_kv_heads, 40, head_dim)
    batch = make_batch(rows, positions)
    q_THD = 2 * randn(len(rows), num_heads, head_dim)
    for layer in (0, 1):
        got = attend(q_THD, cache, layer, batch, window).double()
        expected = attention_by_torch(q_THD, cache, layer, batch, window)
        torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-6)


def test_attend_to_large_scores_is_stable() -> None:
    cache = make_cache(1, 1, 30, 16)
    batch = make_batch([0], [29])
    q_THD = 300 * randn(1, 2, 16)
    expected = attention_by_torch(q_THD, cache, 0, batch, 0)
    assert (expected.abs() > 0.1).any()
    got = attend(q_THD, cache, 0, batch, 0).double()
    torch.testing.assert_close(got, expected, rtol=5e-4, atol=1e-4)


def test_attend_sees_nothing_past_its_position_nor_before_its_window() -> None:
    cache = make_cache(2, 2, 20, 16)
    q_THD, batch = randn(1, 4, 16), make_batch([1], [9])
    before = attend(q_THD, cache, 0, batch, 4)
    keys, values = cache.keys_by_position, cache.values
    for tensor in (keys, values):
        tensor[0, 1, :, 10:] = NAN
        tensor[0, 1, :, :6] = NAN
        tensor[0, 0] = NAN
        tensor[1] = NAN
    assert same_bits(attend(q_THD, in_cells(keys, values), 0, batch, 4), before)


def test_store_rounds_as_torch_does_and_touches_nothing_else() -> None:
    largest = torch.finfo(torch.float32).max
    # A float32 halfway between two bfloat16 goes to the even one.
    halves = torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8, -(1 + 2.0**-8), 1 + 2.0**-8 + 2.0**-20])
    odd_ones = torch.tensor([0.0, -0.0, INF, -INF, NAN, largest, 2.0**-149, -(2.0**-130)])
    k_TGD = torch.cat([halves, odd_ones, randn(24)]).reshape(3, 2, 6)
    v_TGD = k_TGD.flip(0)
    # An infinite item makes its pair NaN even where it is turned by nothing.
    turned_TGD = rotate_by_torch(k_TGD, torch.ones(3, 3), torch.zeros(3, 3))
    cache = make_cache(4, 2, 5, 6)
    expected = KVCache(cache.keys_by_position, cache.values.clone())
    for tensor in (expected.keys, expected.values):
        tensor[..., 6:] = 5.0  # Whatever memory holds.
    cache = in_cells(expected.keys, expected.values.clone())
    for t, (row, position) in enumerate([(2, 4), (0, 0), (2, 1)]):
        for tensor, part in ((expected.keys, turned_TGD), (expected.values, v_TGD)):
            tensor[1, row, :, position, :6] = part[t].bfloat16()
            tensor[1, row, :, position, 6:] = 0
    store(cache, 1, k_TGD, v_TGD, make_batch([2, 0, 2], [4, 0, 1]))
    keys = cache.keys_by_position
    torch.testing.assert_close(keys, expected.keys, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(cache.values, expected.values, rtol=0, atol=0, equal_nan=True)
    by_hand = [1.0, 1 + 2.0**-6, -1.0, 1 + 2.0**-7]
    assert keys[1, 2, 0, 4, :4].tolist() == by_hand
    assert cache.values[1, 2, 0, 1, :4].tolist() == by_hand


def test_keys_are_prepared_as_queries_are() -> None:
    for head_dim in (16, 10):
        x_T1D, v_T1D = randn(5, 1, head_dim), randn(5, 1, head_dim, seed=1)
        heads = turned(head_dim, 9, layer=1, gains=True)
        heads = replace(heads, k_gain=heads.q_gain)
        cache, batch = make_cache(3, 1, 9, head_dim), make_batch([2, 0, 2, 1, 2], [4, 0, 5, 8, 6])
        qkv_TJ = torch.cat([x_T1D, x_T1D, v_T1D], dim=1).flatten(1)
        q_T1D = prepare(qkv_TJ, heads, cache, batch)
        keys_T1D = cache.keys_by_position[1, batch.rows, :, batch.positions, :head_dim]
        assert torch.equal(keys_T1D, q_T1D.bfloat16())
        assert torch.equal(
            cache.values[1, batch.rows, :, batch.positions, :head_dim], v_T1D.bfloat16()
        )
        # And these are what norm and rotation make of them.
        assert heads.q_gain is not None
        normed_T1D = rms_norm(x_T1D, heads.q_gain, heads.eps)
        cos, sin = heads.cos[batch.positions], heads.sin[batch.positions]
        assert same_bits(rotate(normed_T1D, cos, sin), q_T1D)


def cut_cache(cache: CellCache, head_dim: int, dtype: torch.dtype) -> KVCache:
    """What a cache holds, without the padding of the heads."""
    keys, values = (
        part[..., :head_dim].to(dtype, copy=True) for part in (cache.keys_by_position, cache.values)
    )
    return KVCache(keys, values)


@pytest.mark.parametrize("window", [0, 1, 3, 19])
@pytest.mark.parametrize("gains", [True, False])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"), [(4, 2, 16), (6, 6, 10), (7, 1, 64), (6, 2, 20)]
)
def test_attention_agrees_with_torch(
    num_heads: int, num_kv_heads: int, head_dim: int, gains: bool, window: int
) -> None:
    batch = make_batch(ROWS, POSITIONS)
    qkv_TJ = randn(len(ROWS), (num_heads + 2 * num_kv_heads) * head_dim)
    before = qkv_TJ.clone()
    heads = turned(head_dim, 40, layer=1, window=window, gains=gains)
    ours = make_cache(4, num_kv_heads, 40, head_dim)
    # In a bfloat16 cache few items may be rounded the other way, in a float32 one none is rounded.
    theirs = {dtype: cut_cache(ours, head_dim, dtype) for dtype in (torch.bfloat16, torch.float32)}
    got_TJ = BACKEND.attention(heads)(qkv_TJ, ours, batch)
    assert got_TJ.dtype == torch.float32
    assert same_bits(qkv_TJ, before)
    reference = TorchBackend(torch.float32).attention(heads)
    for (dtype, cache), limit in zip(theirs.items(), (2e-3, 1e-2), strict=True):
        expected_TJ = reference(qkv_TJ, cache, batch)
        assert got_TJ.shape == expected_TJ.shape == (len(ROWS), num_heads * head_dim)
        error_T = (got_TJ - expected_TJ).norm(dim=1) / expected_TJ.norm(dim=1)
        assert error_T.max() < limit
        written = cut_cache(ours, head_dim, dtype)
        assert torch.equal(written.values, cache.values.bfloat16().to(dtype))
        torch.testing.assert_close(written.keys, cache.keys, rtol=2**-7, atol=1e-6)


# --- The same bits alone and in company ---


@EVERY_ROW_OPERATION
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 8, 16, 33, 64, 65, 67, 130])
def test_rows_alone_and_in_company(
    operation: RowOperation, shape: tuple[int, ...], num_rows: int
) -> None:
    x = 3 * randn(num_rows, *shape)
    together = operation(x)
    for index in {0, num_rows // 2, max(0, num_rows - 2), num_rows - 1}:
        alone = operation(x[index : index + 1].clone())
        assert same_bits(together[index : index + 1], alone)


@EVERY_ROW_OPERATION
@MANY
@given(data=st.data())
def test_rows_in_any_company(
    operation: RowOperation, shape: tuple[int, ...], data: st.DataObject
) -> None:
    mine = randn(1, *shape, seed=data.draw(st.integers(0, 1000)))
    alone = operation(mine)
    num_rows = data.draw(st.integers(1, 140))
    index = data.draw(st.integers(0, num_rows - 1))
    others = randn(num_rows, *shape, seed=7) * data.draw(st.sampled_from([0.0, 1e-30, 1.0, 1e30]))
    others[data.draw(st.integers(0, num_rows - 1))] = data.draw(st.sampled_from([0.0, NAN, INF]))
    others[index] = mine[0]
    assert same_bits(operation(others)[index : index + 1], alone)


@EVERY_ROW_OPERATION
@pytest.mark.parametrize("num_rows", [1, 2, 5, 66])
def test_memory_layout_changes_no_bit(
    operation: RowOperation, shape: tuple[int, ...], num_rows: int
) -> None:
    x = randn(num_rows, *shape)
    expected = operation(x)
    assert same_bits(operation(x), expected)
    doubled = torch.stack([x, x + 1], dim=-1)[..., 0]
    within = torch.cat([x - 1, x, x + 1], dim=-1).narrow(-1, shape[-1], shape[-1])
    transposed = x.transpose(0, -1).contiguous().transpose(0, -1)
    storage = torch.empty(x.numel() + 1)
    shifted = storage[1:].view(x.shape).copy_(x)  # Off by 4 bytes from any vector boundary.
    for view in (doubled, within, transposed, shifted):
        assert same_bits(operation(view), expected)


@EVERY_ROW_OPERATION
def test_the_place_in_memory_changes_no_bit(
    operation: RowOperation, shape: tuple[int, ...]
) -> None:
    """LLVM checks at run time how near arrays lie, and may take another loop where they are close."""
    size = math.prod(shape)
    buffer = torch.empty(2 * size + 512)
    expected = operation(randn(1, *shape))
    results = []
    for offset in (0, 1, 3, 16, 37, 48, 64, 128, 190):
        x = buffer[offset : offset + size].view(1, *shape)
        x.copy_(randn(1, *shape))
        neighbours = [torch.empty(offset + 1) for _ in range(3)]  # What the allocator puts between.
        results.append(operation(x))
        del neighbours
    assert all(same_bits(result, expected) for result in results)


@pytest.mark.parametrize("num_apart", [16, 20, 32, 48, 60, 64, 128, -16, -48, -64])
def test_neighbouring_arrays_change_no_bit(num_apart: int) -> None:
    x, gain = 3 * randn(1, 16).numpy(), randn(16, seed=1).numpy()
    expected = np.empty_like(x)
    kernels.rms_norm(x, gain, 1e-6, expected)
    buffer = np.empty(512, np.float32)
    near, out = buffer[256:272], buffer[256 + num_apart : 272 + num_apart][None]
    near[:] = gain
    kernels.rms_norm(x, near, 1e-6, out)
    np.testing.assert_array_equal(out, expected)
    near[:] = x[0]
    kernels.rms_norm(near[None], gain, 1e-6, out)
    np.testing.assert_array_equal(out, expected)


@EVERY_ROW_OPERATION
def test_number_of_threads_changes_no_bit(operation: RowOperation, shape: tuple[int, ...]) -> None:
    x = randn(67, *shape)
    expected = operation(x)
    with num_threads(2):
        assert same_bits(operation(x), expected)


def test_number_of_threads_changes_no_attention() -> None:
    cache, batch = make_cache(4, 2, 40, 16), make_batch(ROWS, POSITIONS)
    q_THD = randn(len(ROWS), 4, 16)
    expected = attend(q_THD, cache, 0, batch, 8)
    with num_threads(2):
        assert same_bits(attend(q_THD, cache, 0, batch, 8), expected)


@pytest.mark.parametrize("head_dim", [16, 10, 64])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 16, 65])
def test_rotate_alone_and_in_company(num_rows: int, head_dim: int) -> None:
    x_THD, angles = randn(num_rows, 3, head_dim), randn(num_rows, head_dim // 2, seed=1)
    together = rotate(x_THD, angles.cos(), angles.sin())
    # As the model calls it: among the heads of a fused projection.
    fused = torch.cat([x_THD - 1, x_THD, x_THD + 1], dim=1)
    assert same_bits(rotate(fused, angles.cos(), angles.sin())[:, 3:6], together)
    for t in range(num_rows):
        mine = slice(t, t + 1)
        for heads_1HD, first in ((x_THD[mine], 0), (fused[mine], 3)):
            alone = rotate(heads_1HD, angles[mine].cos(), angles[mine].sin())
            assert same_bits(alone[:, first : first + 3], together[mine])


@pytest.mark.parametrize("window", [0, 1, 7])
@MANY
@given(data=st.data())
def test_attend_alone_and_in_company(window: int, data: st.DataObject) -> None:
    num_heads, num_kv_heads, head_dim = data.draw(
        st.sampled_from([(4, 2, 16), (6, 6, 10), (7, 1, 64)])
    )
    cache = make_cache(5, num_kv_heads, 60, head_dim)
    places = data.draw(
        st.lists(st.tuples(st.integers(0, 4), st.integers(0, 59)), min_size=1, max_size=40)
    )
    rows, positions = [list(column) for column in zip(*places, strict=True)]
    q_THD = randn(len(rows), num_heads, head_dim, seed=data.draw(st.integers(0, 1000)))
    together = attend(q_THD, cache, 1, make_batch(rows, positions), window)
    t = data.draw(st.integers(0, len(rows) - 1))
    # Alone, in another cache row, a view into the fused projection, and with other neighbours.
    moved = CellCache(cache.keys.roll(1, 1), cache.values.roll(1, 1))
    batch = make_batch([(rows[t] + 1) % 5], [positions[t]])
    fused = torch.cat([q_THD + 1, q_THD, q_THD], dim=1)
    view = fused[t : t + 1, num_heads : 2 * num_heads]
    assert same_bits(attend(view, moved, 1, batch, window), together[t : t + 1])
    order = data.draw(st.permutations(range(len(rows))))
    shuffled = make_batch([rows[i] for i in order], [positions[i] for i in order])
    assert same_bits(attend(q_THD[order], cache, 1, shuffled, window), together[order])


def in_passes_of(
    size: int, attention: Attention, qkv_TJ: torch.Tensor, cache: KVCache, batch: StepBatch
) -> torch.Tensor:
    """The attention of all tokens, so many a pass."""
    parts = []
    for start in range(0, len(qkv_TJ), size):
        part = slice(start, start + size)
        rows, positions = batch.rows[part].tolist(), batch.positions[part].tolist()
        parts.append(attention(qkv_TJ[part], cache, make_batch(rows, positions)))
    return torch.cat(parts)


@pytest.mark.parametrize("window", [0, 1, 7])
@pytest.mark.parametrize("gains", [True, False])
@MANY
@given(data=st.data())
def test_attention_alone_and_in_company(gains: bool, window: int, data: st.DataObject) -> None:
    num_heads, num_kv_heads, head_dim = data.draw(
        st.sampled_from([(4, 2, 16), (6, 6, 10), (7, 1, 64)])
    )
    attention = BACKEND.attention(turned(head_dim, 60, layer=1, window=window, gains=gains))
    # Rows that go on from where they are, their tokens interleaved.
    lengths = data.draw(st.lists(st.integers(0, 40), min_size=5, max_size=5))
    rows = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=19))
    positions = [lengths[row] + rows[:t].count(row) for t, row in enumerate(rows)]
    size = (num_heads + 2 * num_kv_heads) * head_dim
    qkv_TJ = randn(len(rows), size, seed=data.draw(st.integers(0, 1000)))
    together, apart, moved = (make_cache(5, num_kv_heads, 60, head_dim) for _ in range(3))
    got_TJ = attention(qkv_TJ, together, make_batch(rows, positions))
    batch = make_batch(rows, positions)
    assert same_bits(in_passes_of(1, attention, qkv_TJ, apart, batch), got_TJ)
    # In other cache rows, views into a wider tensor, and in another order.
    order = sorted(range(len(rows)), key=lambda t: (rows[t], positions[t]))
    batch = make_batch([(rows[t] + 1) % 5 for t in order], [positions[t] for t in order])
    moved = CellCache(moved.keys.roll(1, 1), moved.values.roll(1, 1))
    view_TJ = torch.cat([qkv_TJ + 1, qkv_TJ], dim=1)[order, size:]
    passes = data.draw(st.integers(2, 19))
    assert same_bits(in_passes_of(passes, attention, view_TJ, moved, batch), got_TJ[order])
    for name in ("keys", "values"):
        written = getattr(together, name)
        assert torch.equal(getattr(apart, name), written)
        assert torch.equal(getattr(moved, name).roll(-1, 1), written)


def test_stored_bits_do_not_depend_on_the_pass() -> None:
    k_TGD, v_TGD = randn(9, 2, 6), randn(9, 2, 6, seed=1)
    rows, positions = [0, 1, 0, 2, 1, 0, 2, 2, 1], [0, 0, 1, 0, 1, 2, 1, 2, 2]
    together, apart = make_cache(3, 2, 3, 6), make_cache(3, 2, 3, 6)
    fused = torch.cat([k_TGD, v_TGD], dim=1)
    store(together, 0, fused[:, :2], fused[:, 2:], make_batch(rows, positions))
    for t in range(9):
        batch = make_batch(rows[t : t + 1], positions[t : t + 1])
        store(apart, 0, fused[t : t + 1, :2], fused[t : t + 1, 2:], batch)
    assert torch.equal(together.keys, apart.keys)
    assert torch.equal(together.values, apart.values)
    keys = together.keys_by_position[0, ..., :3, :6]
    assert torch.equal(keys, _scattered(k_TGD, rows, positions))


def _scattered(k_TGD: torch.Tensor, rows: list[int], positions: list[int]) -> torch.Tensor:
    out = torch.empty(3, 2, 3, 6, dtype=torch.bfloat16)
    for t, (row, position) in enumerate(zip(rows, positions, strict=True)):
        out[row, :, position] = k_TGD[t].bfloat16()
    return out


# --- A broken row is seen, and stays alone ---


@EVERY_ROW_OPERATION
@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("index", [0, 2, 5])
def test_a_broken_row_leaves_its_neighbours_alone(
    operation: RowOperation, shape: tuple[int, ...], value: float, index: int
) -> None:
    x = randn(6, *shape)
    expected = operation(x)
    x[index].view(-1)[1] = value
    got = operation(x)
    others = [i for i in range(6) if i != index]
    assert same_bits(got[others], expected[others])
    assert not torch.isfinite(got[index]).all()


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("max_code", [127, MAX_WIDE_CODE])
@pytest.mark.parametrize("num_rows", [1, 4, 6])
def test_a_broken_row_is_nan_in_every_output(num_rows: int, max_code: int, value: float) -> None:
    x = randn(num_rows, 48)
    x[-1, 47] = value
    got = int8_linear(67, 48, max_code)(x)
    assert got[-1].isnan().all()
    assert got[:-1].isfinite().all()


def test_a_broken_query_is_seen() -> None:
    cache, batch = make_cache(2, 2, 20, 16), make_batch([0, 1, 1], [5, 8, 9])
    q_THD = randn(3, 4, 16)
    expected = attend(q_THD, cache, 0, batch, 0)
    q_THD[1, 3, 2] = NAN
    got = attend(q_THD, cache, 0, batch, 0)
    assert got[1, 3].isnan().all()
    got[1, 3] = expected[1, 3]
    assert same_bits(got, expected)


@pytest.mark.parametrize("which", ["keys", "values"])
@pytest.mark.parametrize("position", [0, 4, 9])
def test_a_broken_cache_row_is_seen(which: str, position: int) -> None:
    cache, batch = make_cache(2, 2, 20, 16), make_batch([0, 1], [9, 9])
    q_THD = randn(2, 4, 16)
    expected = attend(q_THD, cache, 0, batch, 0)
    keys, values = cache.keys_by_position, cache.values
    {"keys": keys, "values": values}[which][0, 1, 0, position, 3] = NAN
    got = attend(q_THD, in_cells(keys, values), 0, batch, 0)
    assert got[1, :2].isnan().any(-1).all()
    assert same_bits(got[0], expected[0])
    assert same_bits(got[1, 2:], expected[1, 2:])


@EVERY_ROW_OPERATION
def test_kernels_leave_their_inputs_alone(operation: RowOperation, shape: tuple[int, ...]) -> None:
    x = randn(5, *shape)
    before = x.clone()
    operation(x)
    assert same_bits(x, before)


@pytest.mark.parametrize("kind", ["int8", "bf16"])
def test_weights_run_where_they_lie(kind: str) -> None:
    codes_NK, scale_N = quantize_rows(randn(8, 32))
    weight, scale = (pack(codes_NK), scale_N) if kind == "int8" else (codes_NK.bfloat16(), None)
    linear = BACKEND.linear(LinearWeights(weight, scale))
    x = randn(1, 32)
    before = linear(x)
    weight.zero_()  # No copy was made: the change shows.
    assert before.any()
    assert np.count_nonzero(linear(x).numpy()) == 0


@pytest.mark.parametrize("offset", [1, 2, 8, 31])
def test_packed_weights_may_lie_at_any_address(offset: int) -> None:
    codes_NK, scale_N = quantize_rows(randn(67, 41, seed=1))
    packed = pack(codes_NK)
    memory = torch.empty(packed.numel() + offset, dtype=torch.int8)
    shifted = memory[offset:].view(packed.shape).copy_(packed)
    x_MK = randn(7, 41)
    expected = BACKEND.linear(LinearWeights(packed, scale_N))(x_MK)
    assert same_bits(BACKEND.linear(LinearWeights(shifted, scale_N))(x_MK), expected)
