"""Symmetric int8: codes worked out by hand, integer sums that are exact whatever the inputs."""

import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quant.int8 import dequantize_rows, max_activation_code, pack, quantize_rows, unpack
from tests.tiny import num_threads
from workers import kernels
from workers.backend import LinearWeights
from workers.cpu import CpuBackend
from workers.torch_backend import TorchBackend

INT32_MAX = 2147483647
ROW_COUNTS = (1, 2, 3, 4, 5, 16, 33, 64, 65, 130)
SUBNORMAL = 2.0**-149  # The smallest positive float32.

Quantizer = Callable[..., tuple[torch.Tensor, torch.Tensor]]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    with num_threads(1):
        yield


def kernel_codes(x_MK: torch.Tensor, max_code: int = 127) -> tuple[torch.Tensor, torch.Tensor]:
    """What the CPU kernel makes of the rows."""
    codes_MK, scale_M = np.empty(x_MK.shape, np.int16), np.empty(len(x_MK), np.float32)
    kernels.quantize_rows(x_MK.numpy(), max_code, codes_MK, scale_M)
    return torch.from_numpy(codes_MK), torch.from_numpy(scale_M)


QUANTIZERS = pytest.mark.parametrize("quantize", [quantize_rows, kernel_codes])

BY_HAND = [
    # (row, codes, scale); scale = largest / 127, codes = row / scale, halves to even.
    ([127.0, -63.5, 0.5, 1.5], [127, -64, 0, 2], 1.0),
    ([-127.0, 62.5, -0.5, -1.5], [-127, 62, 0, -2], 1.0),
    ([-254.0, 254.0, 1.0, 3.0], [-127, 127, 0, 2], 2.0),
    ([31.75, 0.125, 0.25, -0.375], [127, 0, 1, -2], 0.25),
    ([0.0, 0.0, 0.0, 0.0], [0, 0, 0, 0], 1.0),
    ([0.0, -0.0, 0.0, -1016.0], [0, 0, 0, -127], 8.0),
    ([2.0**-100 * 127, 2.0**-100, 0.0, 0.0], [127, 1, 0, 0], 2.0**-100),
]


@QUANTIZERS
@pytest.mark.parametrize(("row", "codes", "scale"), BY_HAND)
def test_codes_by_hand(
    quantize: Quantizer, row: list[float], codes: list[int], scale: float
) -> None:
    x_MK = torch.tensor([[9.0, 0.0, 0.0, 0.0], row])
    before = x_MK.clone()
    got, scale_M = quantize(x_MK)
    assert got[1].tolist() == codes
    assert scale_M[1] == scale
    assert scale_M.dtype == torch.float32
    assert torch.equal(x_MK, before)


@QUANTIZERS
def test_more_bits_by_hand(quantize: Quantizer) -> None:
    codes, scale = quantize(torch.tensor([[2000.0, -1000.5, 999.5, -2000.0]]), 2000)
    assert codes.tolist() == [[2000, -1000, 1000, -2000]]  # 1000.5 and 999.5 are halves: to even.
    assert codes.dtype == torch.int16
    assert scale.tolist() == [1.0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_any_float_dtype_gives_int8(dtype: torch.dtype) -> None:
    codes, scale = quantize_rows(torch.tensor([[63.5, -1.0, 0.25]], dtype=dtype))
    assert codes.dtype == torch.int8
    assert codes.tolist() == [[127, -2, 0]]
    assert scale.tolist() == [0.5]


def test_dequantized_by_hand() -> None:
    codes = torch.tensor([[127, -127, 0], [1, 2, 3]], dtype=torch.int8)
    got = dequantize_rows(codes, torch.tensor([2.0, 0.5]))
    assert got.tolist() == [[254.0, -254.0, 0.0], [0.5, 1.0, 1.5]]


def test_packed_by_hand() -> None:
    # Row n holds 6 n - 54 and the five numbers after it; 18 x 6 makes 2 x 2 cells of 16 x 4.
    codes_NK = (torch.arange(18 * 6) - 54).to(torch.int8).reshape(18, 6)
    packed = pack(codes_NK)
    assert packed.dtype == torch.int8
    assert packed.shape == (2, 2, 16, 4)
    assert packed.is_contiguous()
    # Outputs 0 to 15, inputs 4 and 5, and two that do not exist.
    assert packed[0, 1].tolist() == [
        [-50, -49, 0, 0],
        [-44, -43, 0, 0],
        [-38, -37, 0, 0],
        [-32, -31, 0, 0],
        [-26, -25, 0, 0],
        [-20, -19, 0, 0],
        [-14, -13, 0, 0],
        [-8, -7, 0, 0],
        [-2, -1, 0, 0],
        [4, 5, 0, 0],
        [10, 11, 0, 0],
        [16, 17, 0, 0],
        [22, 23, 0, 0],
        [28, 29, 0, 0],
        [34, 35, 0, 0],
        [40, 41, 0, 0],
    ]
    assert packed[0, 0, :2].flatten().tolist() == [-54, -53, -52, -51, -48, -47, -46, -45]
    assert packed[1, 0].tolist() == [[42, 43, 44, 45], [48, 49, 50, 51]] + [[0] * 4] * 14
    assert packed[1, 1].tolist() == [[46, 47, 0, 0], [52, 53, 0, 0]] + [[0] * 4] * 14


@settings(deadline=None, derandomize=True, database=None)
@given(num_outputs=st.integers(1, 70), num_inputs=st.integers(1, 45))
def test_packing_keeps_every_code_and_adds_only_zeros(num_outputs: int, num_inputs: int) -> None:
    rng = np.random.default_rng(num_outputs * 100 + num_inputs)
    codes = rng.integers(1, 128, (num_outputs, num_inputs)) * rng.choice([-1, 1], num_inputs)
    codes_NK = torch.from_numpy(codes.astype(np.int8))
    before = codes_NK.clone()
    packed = pack(codes_NK)
    assert packed.shape == (math.ceil(num_outputs / 16), 2 * math.ceil(num_inputs / 8), 16, 4)
    assert packed.is_contiguous()
    assert torch.equal(unpack(packed, num_outputs, num_inputs), codes_NK)
    assert int(packed.count_nonzero()) == num_outputs * num_inputs
    assert torch.equal(codes_NK, before)
    # However the codes lie in memory.
    assert torch.equal(pack(codes_NK.T.contiguous().T), packed)


FLOATS = st.floats(-(2.0**120), 2.0**120, width=32, allow_subnormal=False)


@QUANTIZERS
@settings(deadline=None, derandomize=True, database=None, max_examples=60)
@given(
    row=st.lists(FLOATS, min_size=1, max_size=40),
    max_code=st.sampled_from([127, 1887, 32767]),
)
def test_codes_are_symmetric_and_within_half_a_step(
    quantize: Quantizer, row: list[float], max_code: int
) -> None:
    x_MK = torch.tensor([row])
    if 0 < x_MK.abs().max() < 2.0**-100:
        x_MK *= 2.0**60  # Scales of subnormal size have a test of their own.
    codes, scale = quantize(x_MK, max_code)
    assert int(codes.abs().max()) == (max_code if x_MK.any() else 0)
    error = (x_MK.double() - codes.double() * scale.double()).abs().max()
    assert error <= 0.5 * float(scale) * (1 + max_code * 2.0**-22)
    mirrored, same_scale = quantize(-x_MK, max_code)
    assert torch.equal(mirrored, -codes)
    assert torch.equal(scale, same_scale)


@QUANTIZERS
@pytest.mark.parametrize("max_code", [127, 32767])
@pytest.mark.parametrize("steps", [1, 5, 190, 40000])
def test_subnormal_rows_keep_their_codes_in_range(
    quantize: Quantizer, steps: int, max_code: int
) -> None:
    # The scale of such a row rounds to a few bits, or to zero.
    x_MK = torch.tensor([[steps * SUBNORMAL, -steps * SUBNORMAL, 0.0, SUBNORMAL]])
    codes, scale = quantize(x_MK, max_code)
    assert int(codes.long().abs().max()) <= max_code
    assert torch.isfinite(scale).all()
    assert codes[0, 2] == 0
    assert codes[0, 0] >= 0 >= codes[0, 1]


def test_largest_activation_code_by_hand() -> None:
    # Weights of other tools go down to -128, which is 2 ** 7: 2 ** 31 - 1 over 2 ** 7 times the inputs.
    assert max_activation_code(8960) == 1872  # 16777215.99 / 8960 = 1872.5
    assert max_activation_code(1536) == 10922  # 16777215.99 / 1536 = 10922.7
    assert max_activation_code(64) == 32639  # 127 * 256 + 127, two signed bytes
    assert max_activation_code(514) == 32639  # 16777215.99 / 514 = 32640.5
    assert max_activation_code(515) == 32577  # 16777215.99 / 515 = 32577.1


@given(num_inputs=st.integers(1, 200_000))
@settings(deadline=None, derandomize=True, database=None)
def test_largest_activation_code_never_overflows(num_inputs: int) -> None:
    code = max_activation_code(num_inputs)
    assert code * 128 * num_inputs <= INT32_MAX
    assert code == 32639 or (code + 1) * 128 * num_inputs > INT32_MAX


def by_numpy(
    codes_MK: np.ndarray, scale_M: np.ndarray, weight_NK: np.ndarray, scale_N: np.ndarray
) -> np.ndarray:
    """The products summed as int64, then scaled in float32, in the order quant.int8 writes."""
    sums_MN = codes_MK.astype(np.int64) @ weight_NK.astype(np.int64).T
    assert np.abs(sums_MN).max() <= INT32_MAX
    return sums_MN.astype(np.float32) * scale_N * scale_M[:, None]


def codes_that_survive(
    rng: np.random.Generator, num_rows: int, num_inputs: int, max_code: int
) -> tuple[np.ndarray, np.ndarray, torch.Tensor]:
    """Codes, power-of-two scales and the floats that must quantize to just these."""
    codes_MK = rng.integers(-max_code, max_code + 1, (num_rows, num_inputs))
    at = rng.integers(0, num_inputs, num_rows)
    codes_MK[np.arange(num_rows), at] = rng.choice([-max_code, max_code], num_rows)
    scale_M = np.exp2(rng.integers(-9, 3, num_rows)).astype(np.float32)
    x_MK = (codes_MK * scale_M[:, None]).astype(np.float32)
    return codes_MK, scale_M, torch.from_numpy(x_MK)


@pytest.mark.parametrize("num_rows", ROW_COUNTS)
@pytest.mark.parametrize(
    ("num_outputs", "num_inputs"), [(2, 16), (3, 40), (7, 1), (65, 33), (129, 96), (128, 64)]
)
def test_linear_is_exact(num_rows: int, num_outputs: int, num_inputs: int) -> None:
    rng = np.random.default_rng(num_rows * 1000 + num_outputs)
    weight_NK = rng.integers(-127, 128, (num_outputs, num_inputs)).astype(np.int8)
    scale_N = rng.uniform(0.001, 2, num_outputs).astype(np.float32)
    bias_N = rng.normal(size=num_outputs).astype(np.float32)
    for max_code in (127, max_activation_code(num_inputs)):
        codes_MK, scale_M, x_MK = codes_that_survive(rng, num_rows, num_inputs, max_code)
        expected_MN = by_numpy(codes_MK, scale_M, weight_NK, scale_N)
        for bias in (None, bias_N):
            weights = LinearWeights(
                pack(torch.from_numpy(weight_NK)),
                torch.from_numpy(scale_N),
                None if bias is None else torch.from_numpy(bias),
                max_code,
            )
            got_MN = CpuBackend().linear(weights)(x_MK).numpy()
            np.testing.assert_array_equal(
                got_MN, expected_MN if bias is None else expected_MN + bias
            )


@pytest.mark.parametrize("num_rows", [1, 4, 5, 65])
@pytest.mark.parametrize("max_code", [127, 1887])
def test_worst_case_sums_are_exact(num_rows: int, max_code: int) -> None:
    # All codes as large as they get: u8 x s8 kernels that add pairs in int16 saturate here.
    num_inputs = 8960
    sign_N = torch.tensor([-1, 1, -1], dtype=torch.int8)
    weight_NK = (127 * sign_N)[:, None].expand(3, num_inputs)
    x_MK = torch.full((num_rows, num_inputs), float(max_code))
    weights = LinearWeights(pack(weight_NK), torch.ones(3), max_code=max_code)
    # 127 * 127 * 8960 and 1887 * 127 * 8960; a factor 2**8 lets float32 hold both exactly.
    total = {127: 144515840.0, 1887: 2147255040.0}[max_code]
    for backend in (CpuBackend(), TorchBackend(torch.float32)):
        got_MN = backend.linear(weights)(x_MK)
        assert got_MN.tolist() == [[-total, total, -total]] * num_rows


@pytest.mark.parametrize("num_rows", ROW_COUNTS)
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(2, 64), (67, 40), (96, 200), (301, 33)])
def test_both_backends_give_the_same_bits(num_rows: int, num_outputs: int, num_inputs: int) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    x_MK = torch.randn(num_rows, num_inputs, generator=generator) * 10
    x_MK[0] = 0
    codes_NK, scale_N = quantize_rows(torch.randn(num_outputs, num_inputs, generator=generator))
    bias_N = torch.randn(num_outputs, generator=generator)
    for max_code in (127, max_activation_code(num_inputs)):
        for bias in (None, bias_N):
            weights = LinearWeights(pack(codes_NK), scale_N, bias, max_code)
            ours = CpuBackend().linear(weights)(x_MK)
            reference = TorchBackend(torch.float32).linear(weights)(x_MK)
            assert torch.equal(ours, reference)
            expected_row = torch.zeros(num_outputs) if bias is None else bias
            assert torch.equal(ours[0], expected_row)


@pytest.mark.parametrize("max_code", [127, 1872])
def test_rows_in_blocks_are_rows(max_code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x_MK = torch.randn(11, 40, generator=torch.Generator().manual_seed(1))
    x_MK[4] = 0
    whole = quantize_rows(x_MK, max_code)
    monkeypatch.setattr("quant.int8._BLOCK", 4)
    blocks = quantize_rows(x_MK, max_code)
    assert all(torch.equal(*pair) for pair in zip(whole, blocks, strict=True))
    assert blocks[0].dtype == whole[0].dtype
