"""The Ascend NPU's backend, with the vendor's operator played on the CPU."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quant.int8 import max_activation_code, pack
from tests.fakes import TINY, make_pieces, one_thread  # noqa: F401
from workers.backend import LinearWeights, StepBatch
from workers.model import TargetModel
from workers.npu import NpuBackend
from workers.torch_backend import TorchBackend

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight"),
]


def npu_quant_matmul(
    x1: torch.Tensor, x2: torch.Tensor, scale: torch.Tensor, *, output_dtype: torch.dtype
) -> torch.Tensor:
    """As documented: int8 [m, k] times int8 [k, n], a float32 scale of one or n entries."""
    assert x1.dtype == x2.dtype == torch.int8
    assert scale.dtype == torch.float32
    assert scale.shape in ((1,), (x2.shape[1],))
    assert (scale == 1).all()
    assert output_dtype == torch.int32
    return x1.int() @ x2.int()


@pytest.fixture(autouse=True)
def vendor(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = SimpleNamespace(npu_quant_matmul=npu_quant_matmul)
    monkeypatch.setitem(sys.modules, "torch_npu", module)


@pytest.mark.parametrize("num_rows", [1, 3, 45])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(16, 8), (67, 41)])
@pytest.mark.parametrize("wide", [False, True])
def test_a_linear_is_the_reference_ones(
    wide: bool, num_outputs: int, num_inputs: int, num_rows: int
) -> None:
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(-127, 128, (num_outputs, num_inputs), generator=generator)
    weights = LinearWeights(
        pack(codes.to(torch.int8)),
        torch.rand(num_outputs, generator=generator) + 0.1,
        torch.randn(num_outputs, generator=generator),
        max_activation_code(num_inputs) if wide else 127,
    )
    x_TK = torch.randn(num_rows, num_inputs, generator=generator)
    got = NpuBackend(torch.float32, "cpu").linear(weights)(x_TK)
    expected = TorchBackend(torch.float32).linear(weights)(x_TK)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_a_pass_is_the_reference_ones() -> None:
    """Two rows: a prompt of one, two tokens of the other."""
    backends = (NpuBackend(torch.float64, "cpu"), TorchBackend(torch.float64))
    columns = ([5, 6, 7, 8, 9], [0, 0, 0, 1, 1], [0, 1, 2, 0, 1], [2, 4])
    batch = StepBatch(*(torch.tensor(column) for column in columns))
    got, expected = (
        model.forward(batch, model.new_cache(2, 16))
        for model in (TargetModel(TINY, make_pieces("w8a8"), b, max_len=16) for b in backends)
    )
    torch.testing.assert_close(got, expected)


def test_without_the_vendors_package_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    with pytest.raises(ImportError, match="torch_npu"):
        NpuBackend()
