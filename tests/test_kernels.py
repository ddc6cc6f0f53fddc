"""Every operation of the CPU backend: right against float64, and the same bits in any company."""

import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from quant.architecture import Architecture
from quant.int8 import quantize_rows
from tests.tiny import num_threads
from workers.backend import KVCache, Linear, LinearWeights, StepBatch
from workers.cpu import CpuBackend

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
    return BACKEND.linear(LinearWeights(codes_NK, scale_N, randn(num_outputs, seed=2), max_code))


def bf16_linear(num_outputs: int, num_inputs: int) -> Linear:
    weight_NK = randn(num_outputs, num_inputs, seed=1).bfloat16()
    return BACKEND.linear(LinearWeights(weight_NK, bias_N=randn(num_outputs, seed=2)))


def norm(size: int) -> RowOperation:
    gain = randn(size, seed=3)
    return lambda x: BACKEND.rms_norm(x, gain, 1e-6)


# Operations whose input is one row per token: (operation, shape of a token's row).
ROW_OPERATIONS: dict[str, tuple[RowOperation, tuple[int, ...]]] = {
    "int8": (int8_linear(67, 96), (96,)),
    "int8-padded": (int8_linear(130, 41), (41,)),
    "int8-head": (int8_linear(33, 64, max_code=32767), (64,)),
    "bf16": (bf16_linear(67, 96), (96,)),
    "bf16-padded": (bf16_linear(130, 41), (41,)),
    "norm": (norm(64), (64,)),
    "norm-odd": (norm(37), (37,)),
    "head-norm": (norm(16), (4, 16)),
    "head-norm-odd": (norm(10), (3, 10)),
    "silu_mul": (BACKEND.silu_mul, (192,)),
    "silu_mul-odd": (BACKEND.silu_mul, (74,)),
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
    got = BACKEND.linear(LinearWeights(codes_NK, scale_N, bias_N))(x_MK).double()
    expected = x_MK.double() @ weight_NK.double().T + bias_N.double()
    # Half a step of at most 5 / 127 on either side, over K products of size 1: 3 % is generous.
    assert (got - expected).norm() < 0.03 * expected.norm()


@pytest.mark.parametrize("shape", [(1, 64), (5, 64), (3, 37), (4, 4, 16), (3, 2, 10), (2, 1536)])
@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_rms_norm(shape: tuple[int, ...], eps: float) -> None:
    x, gain = 5 * randn(*shape), randn(shape[-1], seed=1)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * gain.double()
    got = BACKEND.rms_norm(x, gain, eps)
    torch.testing.assert_close(got.double(), expected, rtol=3e-6, atol=1e-6)


def test_rms_norm_by_hand() -> None:
    # mean(9, 16, 0, 0) = 6.25 = 2.5 ** 2
    got = BACKEND.rms_norm(torch.tensor([[3.0, -4.0, 0.0, 0.0]]), torch.tensor([1.0, 5, 2, 2]), 0.0)
    torch.testing.assert_close(got, torch.tensor([[1.2, -8.0, 0.0, 0.0]]))
    zero = BACKEND.rms_norm(torch.zeros(1, 4), torch.ones(4), 1e-6)
    assert zero.tolist() == [[0.0] * 4]


@pytest.mark.parametrize("operation", ["norm", "silu_mul", "linear", "rotate"])
def test_a_pass_of_no_rows(operation: str) -> None:
    empty = {
        "norm": lambda: BACKEND.rms_norm(torch.empty(0, 64), torch.ones(64), 1e-6),
        "silu_mul": lambda: BACKEND.silu_mul(torch.empty(0, 128)),
        "linear": lambda: int8_linear(64, 32)(torch.empty(0, 32)),
        "rotate": lambda: BACKEND.rotate(
            torch.empty(0, 4, 16), torch.empty(0, 8), torch.empty(0, 8)
        ).reshape(0, 64),
    }
    assert empty[operation]().shape == (0, 64)


def test_silu_mul() -> None:
    gate = torch.cat([torch.linspace(-80, 80, 3201), torch.tensor([0.0, 1e-30, -1e-30])])
    up = 1 + randn(len(gate)).abs()
    got = BACKEND.silu_mul(torch.cat([gate, up])[None])[0].double()
    wide = gate.double()
    expected = wide / (1 + torch.exp(-wide)) * up.double()
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-35)


def test_silu_mul_far_out() -> None:
    gate = torch.tensor([-3e38, -1e4, -100.0, 100.0, 1e4, 3e38])
    got = BACKEND.silu_mul(torch.cat([gate, torch.ones(6)])[None])[0]
    # silu is 0 on the far left (within 2 of the smallest normal floats) and the identity right.
    torch.testing.assert_close(got[1:3], torch.zeros(2), rtol=0, atol=1e-33)
    torch.testing.assert_close(got[3:], gate[3:], rtol=1e-6, atol=0)
    assert abs(got[0]) < 4  # x * exp(x), the exponent held at the edge of the range


def test_rotate() -> None:
    x_THD, angles = randn(5, 3, 20), 10 * randn(5, 10, seed=1)
    got = BACKEND.rotate(x_THD, angles.cos(), angles.sin()).double()
    # Pairs (i, i + D / 2) as complex numbers, turned by the angle.
    pairs = torch.complex(*x_THD.double().split(10, dim=-1))
    turned = pairs * torch.polar(torch.ones(5, 1, 10).double(), angles.double()[:, None])
    torch.testing.assert_close(got, torch.cat([turned.real, turned.imag], -1), rtol=1e-5, atol=1e-6)


def make_cache(num_rows: int, num_heads: int, max_len: int, head_dim: int) -> KVCache:
    """A full cache of two layers; the backend may make heads wider than asked, with zeros."""
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
    for seed, tensor in enumerate((cache.keys, cache.values)):
        tensor.zero_()
        shape = (2, num_rows, num_heads, max_len, head_dim)
        tensor[..., :head_dim] = randn(*shape, seed=5 + seed).bfloat16()
    return cache


def make_batch(rows: list[int], positions: list[int]) -> StepBatch:
    nothing = torch.zeros(len(rows), dtype=torch.long)
    return StepBatch(nothing, torch.tensor(rows), torch.tensor(positions), nothing)


def attention_by_torch(
    q_THD: torch.Tensor, cache: KVCache, layer: int, batch: StepBatch, window: int
) -> torch.Tensor:
    """Softmax attention written out in float64, token by token."""
    out_THD = torch.empty(q_THD.shape, dtype=torch.float64)
    repeats, head_dim = q_THD.shape[1] // cache.keys.shape[2], q_THD.shape[2]
    for t, (row, last) in enumerate(
        zip(batch.rows.tolist(), batch.positions.tolist(), strict=True)
    ):
        seen = [p for p in range(last + 1) if not window or p > last - window]
        for head in range(q_THD.shape[1]):
            keys_LD = cache.keys[layer, row, head // repeats, seen, :head_dim].double()
            values_LD = cache.values[layer, row, head // repeats, seen, :head_dim].double()
            scores_L = keys_LD @ q_THD[t, head].double() / math.sqrt(head_dim)
            out_THD[t, head] = scores_L.softmax(0) @ values_LD
    return out_THD


ROWS, POSITIONS = [3, 0, 3, 1, 0, 3, 2], [0, 7, 1, 38, 8, 5, 18]


@pytest.mark.parametrize("window", [0, 1, 2, 8, 19, 1000])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"), [(4, 2, 16), (6, 6, 10), (7, 1, 64), (12, 2, 128)]
)
def test_attend(num_heads: int, num_kv_heads: int, head_dim: int, window: int) -> None:
    cache = make_cache(4, num_kv_heads, 40, head_dim)
    batch = make_batch(ROWS, POSITIONS)
    q_THD = 2 * randn(len(ROWS), num_heads, head_dim)
    for layer in (0, 1):
        got = BACKEND.attend(q_THD, cache, layer, batch, window).double()
        expected = attention_by_torch(q_THD, cache, layer, batch, window)
        torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-6)


def test_attend_to_large_scores_is_stable() -> None:
    cache = make_cache(1, 1, 30, 16)
    batch = make_batch([0], [29])
    q_THD = 300 * randn(1, 2, 16)
    expected = attention_by_torch(q_THD, cache, 0, batch, 0)
    assert (expected.abs() > 0.1).any()
    got = BACKEND.attend(q_THD, cache, 0, batch, 0).double()
    torch.testing.assert_close(got, expected, rtol=5e-4, atol=1e-4)


def test_attend_sees_nothing_past_its_position_nor_before_its_window() -> None:
    cache = make_cache(2, 2, 20, 16)
    q_THD, batch = randn(1, 4, 16), make_batch([1], [9])
    before = BACKEND.attend(q_THD, cache, 0, batch, 4)
    for tensor in (cache.keys, cache.values):
        tensor[0, 1, :, 10:] = NAN
        tensor[0, 1, :, :6] = NAN
        tensor[0, 0] = NAN
        tensor[1] = NAN
    assert same_bits(BACKEND.attend(q_THD, cache, 0, batch, 4), before)


def test_store_rounds_as_torch_does_and_touches_nothing_else() -> None:
    largest = torch.finfo(torch.float32).max
    # A float32 halfway between two bfloat16 goes to the even one.
    halves = torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8, -(1 + 2.0**-8), 1 + 2.0**-8 + 2.0**-20])
    odd_ones = torch.tensor([0.0, -0.0, INF, -INF, NAN, largest, 2.0**-149, -(2.0**-130)])
    k_TGD = torch.cat([halves, odd_ones, randn(24)]).reshape(3, 2, 6)
    v_TGD = randn(3, 2, 6, seed=1)
    cache = make_cache(4, 2, 5, 6)
    expected = KVCache(cache.keys.clone(), cache.values.clone())
    for t, (row, position) in enumerate([(2, 4), (0, 0), (2, 1)]):
        expected.keys[1, row, :, position, :6] = k_TGD[t].bfloat16()
        expected.values[1, row, :, position, :6] = v_TGD[t].bfloat16()
    BACKEND.store(cache, 1, k_TGD, v_TGD, make_batch([2, 0, 2], [4, 0, 1]))
    torch.testing.assert_close(cache.keys, expected.keys, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(cache.values, expected.values)
    by_hand = [1.0, 1 + 2.0**-6, -1.0, 1 + 2.0**-7]
    assert cache.keys[1, 2, 0, 4, :4].tolist() == by_hand


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


@pytest.fixture
def _threads_as_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the backend from running small passes on one thread."""
    monkeypatch.setattr(CpuBackend, "_share", lambda *_: None, raising=False)


@pytest.mark.usefixtures("_threads_as_told")
@EVERY_ROW_OPERATION
def test_number_of_threads_changes_no_bit(operation: RowOperation, shape: tuple[int, ...]) -> None:
    x = randn(67, *shape)
    expected = operation(x)
    with num_threads(2):
        assert same_bits(operation(x), expected)


@pytest.mark.usefixtures("_threads_as_told")
def test_number_of_threads_changes_no_attention() -> None:
    cache, batch = make_cache(4, 2, 40, 16), make_batch(ROWS, POSITIONS)
    q_THD = randn(len(ROWS), 4, 16)
    expected = BACKEND.attend(q_THD, cache, 0, batch, 8)
    with num_threads(2):
        assert same_bits(BACKEND.attend(q_THD, cache, 0, batch, 8), expected)


@pytest.mark.parametrize("head_dim", [16, 10, 64])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 16, 65])
def test_rotate_alone_and_in_company(num_rows: int, head_dim: int) -> None:
    x_THD, angles = randn(num_rows, 3, head_dim), randn(num_rows, head_dim // 2, seed=1)
    together = BACKEND.rotate(x_THD, angles.cos(), angles.sin())
    # As the model calls it: a view into the fused projection.
    fused = torch.cat([x_THD - 1, x_THD, x_THD + 1], dim=1)
    view = fused.split([3, 3, 3], dim=1)[1]
    assert same_bits(BACKEND.rotate(view, angles.cos(), angles.sin()), together)
    for t in range(num_rows):
        mine = slice(t, t + 1)
        alone = BACKEND.rotate(view[mine], angles[mine].cos(), angles[mine].sin())
        assert same_bits(alone, together[mine])


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
    together = BACKEND.attend(q_THD, cache, 1, make_batch(rows, positions), window)
    t = data.draw(st.integers(0, len(rows) - 1))
    # Alone, in another cache row, a view into the fused projection, and with other neighbours.
    moved = KVCache(cache.keys.roll(1, 1), cache.values.roll(1, 1))
    batch = make_batch([(rows[t] + 1) % 5], [positions[t]])
    fused = torch.cat([q_THD + 1, q_THD, q_THD], dim=1)
    view = fused[t : t + 1, num_heads : 2 * num_heads]
    assert same_bits(BACKEND.attend(view, moved, 1, batch, window), together[t : t + 1])
    order = data.draw(st.permutations(range(len(rows))))
    shuffled = make_batch([rows[i] for i in order], [positions[i] for i in order])
    assert same_bits(BACKEND.attend(q_THD[order], cache, 1, shuffled, window), together[order])


def test_stored_bits_do_not_depend_on_the_pass() -> None:
    k_TGD, v_TGD = randn(9, 2, 6), randn(9, 2, 6, seed=1)
    rows, positions = [0, 1, 0, 2, 1, 0, 2, 2, 1], [0, 0, 1, 0, 1, 2, 1, 2, 2]
    together, apart = make_cache(3, 2, 3, 6), make_cache(3, 2, 3, 6)
    fused = torch.cat([k_TGD, v_TGD], dim=1)
    BACKEND.store(together, 0, fused[:, :2], fused[:, 2:], make_batch(rows, positions))
    for t in range(9):
        batch = make_batch(rows[t : t + 1], positions[t : t + 1])
        BACKEND.store(apart, 0, fused[t : t + 1, :2], fused[t : t + 1, 2:], batch)
    assert torch.equal(together.keys, apart.keys)
    assert torch.equal(together.values, apart.values)
    assert torch.equal(together.keys[0, ..., :6], _scattered(k_TGD, rows, positions))


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
@pytest.mark.parametrize("max_code", [127, 32767])
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
    expected = BACKEND.attend(q_THD, cache, 0, batch, 0)
    q_THD[1, 3, 2] = NAN
    got = BACKEND.attend(q_THD, cache, 0, batch, 0)
    assert got[1, 3].isnan().all()
    got[1, 3] = expected[1, 3]
    assert same_bits(got, expected)


@pytest.mark.parametrize("which", ["keys", "values"])
@pytest.mark.parametrize("position", [0, 4, 9])
def test_a_broken_cache_row_is_seen(which: str, position: int) -> None:
    cache, batch = make_cache(2, 2, 20, 16), make_batch([0, 1], [9, 9])
    q_THD = randn(2, 4, 16)
    expected = BACKEND.attend(q_THD, cache, 0, batch, 0)
    getattr(cache, which)[0, 1, 0, position, 3] = NAN
    got = BACKEND.attend(q_THD, cache, 0, batch, 0)
    assert got[1, :2].isnan().any(-1).all()
    assert same_bits(got[0], expected[0])
    assert same_bits(got[1, 2:], expected[1, 2:])


def test_kernels_leave_their_inputs_alone() -> None:
    x = randn(5, 64)
    for operation in (int8_linear(8, 64), bf16_linear(8, 64), norm(64), BACKEND.silu_mul):
        before = x.clone()
        operation(x)
        assert same_bits(x, before)


def test_weights_run_where_they_lie() -> None:
    codes_NK, scale_N = quantize_rows(randn(8, 32))
    array = codes_NK.numpy().copy()
    linear = BACKEND.linear(LinearWeights(torch.from_numpy(array), scale_N))
    x = randn(1, 32)
    before = linear(x)
    array[:] = 0  # No copy was made: the change shows.
    assert before.any()
    assert np.count_nonzero(linear(x).numpy()) == 0
