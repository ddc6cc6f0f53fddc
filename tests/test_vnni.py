"""The products by AVX512-VNNI: exact, the same bits as the other tile, and one instruction each.

Where the CPU has no such instruction, the tile is built of plain ones: all but the instruction is tested.
"""

import llvmlite.binding
import numpy as np
import pytest
import torch
from llvmlite import ir

from quant.int8 import MAX_CODE, MAX_WIDE_CODE, pack
from tests.fakes import one_thread  # noqa: F401
from workers import cpu, matmul, vnni
from workers.backend import LinearWeights

pytestmark = pytest.mark.usefixtures("one_thread")


def codes(num_rows: int, num_columns: int, seed: int, low: int = -127) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.integers(low, 128, (num_rows, num_columns)).astype(np.int8)


def product(x_MK: np.ndarray, weight_NK: np.ndarray) -> np.ndarray:
    """The sums, by way of the kernel's scales and biases of no effect."""
    num_outputs = len(weight_NK)
    padded = -(-num_outputs // 16) * 16
    ones, zeros = np.ones(padded, np.float32), np.zeros(padded, np.float32)
    packed = pack(torch.from_numpy(weight_NK))
    out = np.full((len(x_MK), num_outputs), np.nan, np.float32)
    scale = np.ones(len(x_MK), np.float32)
    matmul.matmul_vnni(x_MK[:, None], scale, packed.data_ptr(), ones, zeros, False, out)
    return out


@pytest.mark.parametrize("num_rows", [*range(1, 10), 16, 23])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(16, 8), (33, 64), (96, 200)])
def test_sums_are_exact(num_rows: int, num_outputs: int, num_inputs: int) -> None:
    x_MK, weight_NK = codes(num_rows, num_inputs, 1), codes(num_outputs, num_inputs, 2, -128)
    expected = x_MK.astype(np.int64) @ weight_NK.astype(np.int64).T
    np.testing.assert_array_equal(product(x_MK, weight_NK), expected.astype(np.float32))


@pytest.mark.parametrize("x", [-127, 127])
@pytest.mark.parametrize("weight", [-128, 127])
def test_nothing_saturates(x: int, weight: int) -> None:
    x_MK, weight_NK = np.full((3, 1024), x, np.int8), np.full((16, 1024), weight, np.int8)
    assert (product(x_MK, weight_NK) == x * weight * 1024).all()


@pytest.mark.parametrize("num_rows", [1, 2, 5, 8, 19])
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("max_code", [MAX_CODE, MAX_CODE + 1, 1872, MAX_WIDE_CODE])
def test_a_linear_has_the_same_bits_as_by_the_other_tile(
    num_rows: int, add: bool, max_code: int
) -> None:
    num_outputs, num_inputs = 67, 41
    rng = np.random.default_rng(3)
    x_MK = rng.normal(size=(num_rows, num_inputs)).astype(np.float32)
    x_MK[-1] = 0
    packed = pack(torch.from_numpy(codes(num_outputs, num_inputs, 4)))
    scale, bias = (rng.normal(size=80).astype(np.float32) for _ in range(2))
    outs = []
    for linear in (matmul.linear_int8, matmul.linear_vnni):
        out = np.ones((num_rows, num_outputs), np.float32)
        linear(x_MK, False, max_code, packed.data_ptr(), scale, bias, add, out)
        outs.append(out)
    np.testing.assert_array_equal(*outs)


def test_a_row_that_is_not_finite_is_seen() -> None:
    x_MK = np.ones((3, 16), np.float32)
    x_MK[1, 5] = np.nan
    packed = pack(torch.from_numpy(codes(16, 16, 5)))
    ones, out = np.ones(16, np.float32), np.empty((3, 16), np.float32)
    matmul.linear_vnni(x_MK, False, MAX_CODE, packed.data_ptr(), ones, ones, False, out)
    assert np.isnan(out).all(axis=1).tolist() == [False, True, False]


def assembly(num_m: int) -> str:
    """What LLVM makes of a tile for a CPU that has the instruction."""
    module = ir.Module("tile")
    module.triple = "x86_64-unknown-linux-gnu"
    kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * 7)
    function = ir.Function(module, kind, "tile")
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    vnni.build_tile(builder, num_m, list(function.args), vnni.vnni_dot)
    builder.ret_void()
    llvmlite.binding.initialize_all_targets()
    llvmlite.binding.initialize_all_asmprinters()
    parsed = llvmlite.binding.parse_assembly(str(module))
    target = llvmlite.binding.Target.from_triple(module.triple)
    machine = target.create_target_machine(cpu="icelake-server", opt=3)
    return str(machine.emit_assembly(parsed))


@pytest.mark.parametrize("num_m", [1, 4, 8])
def test_a_tile_is_one_instruction_a_token_and_cell(num_m: int) -> None:
    """Weights, the unsigned operand, in a register; activations broadcast from memory."""
    lines = [line.split() for line in assembly(num_m).splitlines()]
    dots = [line for line in lines if line and line[0] == "vpdpbusd"]
    assert len(dots) == 4 * num_m
    assert all("{1to16}" in line[1] and "zmm" in line[2] for line in dots)


def test_who_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, scale = pack(torch.from_numpy(codes(16, 16, 6))), torch.ones(16)
    monkeypatch.setattr(cpu.vnni, "HAS_VNNI", True)
    cpu._vnni_is_exact.cache_clear()
    try:
        assert cpu.uses_vnni(LinearWeights(weight, scale))
        assert cpu.uses_vnni(LinearWeights(weight, scale, max_code=128))
        assert not cpu.uses_vnni(LinearWeights(torch.ones(4, 4).bfloat16()))
    finally:
        monkeypatch.undo()
        cpu._vnni_is_exact.cache_clear()


def test_instructions_that_are_wrong_are_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def saturating(*args: object) -> None:
        out = args[-1]
        assert isinstance(out, np.ndarray)
        out[:] = 32767

    monkeypatch.setattr(cpu.vnni, "HAS_VNNI", True)
    monkeypatch.setattr(cpu.matmul, "matmul_vnni", saturating)
    cpu._vnni_is_exact.cache_clear()
    try:
        weight = pack(torch.from_numpy(codes(16, 16, 6)))
        assert not cpu.uses_vnni(LinearWeights(weight, torch.ones(16)))
        assert "wrong sums" in caplog.text
    finally:
        monkeypatch.undo()
        cpu._vnni_is_exact.cache_clear()
