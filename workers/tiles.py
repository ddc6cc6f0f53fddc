"""Matrix kernels for the CPU: a register tile in LLVM's vector form, driven by numba.

A tile computes the dot products of a few token rows with a few weight rows over all inputs at once.
Each (token, output) pair is summed in the same order whatever tile it falls into and whoever shares
the pass, so a token's result has the same bits alone and in company.

Why our own: on x86 without VNNI, oneDNN's u8 x s8 kernels add pairs of products in saturating
int16 and return wrong sums without a word, and torch._int_mm falls to a reference loop. Here int8
weights meet int16 activation codes in `pmaddwd` (or `vpdpwssd`): exact, portable, at the memory floor
for few rows, and on weights in place: no repacked copy, so the actors of a node share one.

Legend: M tokens, N outputs, K inputs (padded to a multiple of TILE_K).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import prange, types
from numba.extending import intrinsic

TILE_K = 16  # Inputs per step of a tile; weights and activations are padded to a multiple.
_TILE_M, _TILE_N = 4, 2
_BLOCK_M, _BLOCK_N = 64, 64

_I8, _I16, _I32, _I64, _F32 = (*(ir.IntType(n) for n in (8, 16, 32, 64)), ir.FloatType())
_Value = Any  # llvmlite is untyped.


_Addresses = Callable[[int], list[_Value]]  # Of each row's items, so many items further on.
_Sums = list[list[_Value]]  # A vector of partial sums for each (token, output) of the tile.


def _int8_step(b: ir.IRBuilder, x: _Addresses, w: _Addresses, sums: _Sums) -> _Sums:
    """Add products of int16 codes with int8 weights, in pairs: LLVM knows it as pmaddwd."""
    wide = ir.VectorType(_I32, TILE_K)
    half = ir.VectorType(_I32, TILE_K // 2)
    even = ir.Constant(half, list(range(0, TILE_K, 2)))
    odd = ir.Constant(half, list(range(1, TILE_K, 2)))

    def add_pairs(total: _Value, product: _Value) -> _Value:
        left, right = (b.shuffle_vector(product, product, lanes) for lanes in (even, odd))
        return b.add(total, b.add(left, right))

    x_wide = [b.sext(v, wide) for v in _load(b, x(0), ir.VectorType(_I16, TILE_K))]
    w_16 = [
        b.sext(v, ir.VectorType(_I16, TILE_K)) for v in _load(b, w(0), ir.VectorType(_I8, TILE_K))
    ]
    w_wide = [b.sext(v, wide) for v in w_16]
    return [
        [add_pairs(total, b.mul(x_m, w_n)) for total, w_n in zip(row, w_wide, strict=True)]
        for row, x_m in zip(sums, x_wide, strict=True)
    ]


def _bf16_step(b: ir.IRBuilder, x: _Addresses, w: _Addresses, sums: _Sums) -> _Sums:
    """Add products of float32 with bfloat16, each rounded once with its sum."""
    lanes = TILE_K // 2
    for offset in (0, lanes):
        x_lanes = _load(b, x(offset), ir.VectorType(_F32, lanes))
        bits = _load(b, w(offset), ir.VectorType(_I16, lanes))
        w_lanes = [_widen_bf16(b, v, lanes) for v in bits]
        sums = [
            [_fma(b, x_m, w_n, total) for total, w_n in zip(row, w_lanes, strict=True)]
            for row, x_m in zip(sums, x_lanes, strict=True)
        ]
    return sums


def _load(b: ir.IRBuilder, addresses: list[_Value], vector: ir.VectorType) -> list[_Value]:
    pointers = [b.inttoptr(address, vector.as_pointer()) for address in addresses]
    return [b.load(pointer, align=1) for pointer in pointers]


def _widen_bf16(b: ir.IRBuilder, bits: _Value, lanes: int) -> _Value:
    wide = b.zext(bits, ir.VectorType(_I32, lanes))
    shift = ir.Constant(ir.VectorType(_I32, lanes), [16] * lanes)
    return b.bitcast(b.shl(wide, shift), ir.VectorType(_F32, lanes))


def _fma(b: ir.IRBuilder, x: _Value, y: _Value, z: _Value) -> _Value:
    """Vectors x * y + z, rounded once."""
    name = f"llvm.fma.v{x.type.count}f32"
    function = b.module.globals.get(name)
    if function is None:
        function = ir.Function(b.module, ir.FunctionType(x.type, [x.type] * 3), name)
    return b.call(function, [x, y, z])


def _index(value: int) -> _Value:
    return ir.Constant(_I64, value)


def _sum_lanes(b: ir.IRBuilder, vector: _Value, add: Callable[[_Value, _Value], _Value]) -> _Value:
    """Add the lanes of a vector by halving, always in the same order."""
    lanes = vector.type.count
    while lanes > 1:
        lanes //= 2
        halves = ir.VectorType(_I32, lanes)
        low = b.shuffle_vector(vector, vector, ir.Constant(halves, list(range(lanes))))
        high = b.shuffle_vector(vector, vector, ir.Constant(halves, list(range(lanes, 2 * lanes))))
        vector = add(low, high)
    return b.extract_element(vector, ir.Constant(_I32, 0))


def _tile_intrinsic(num_m: int, num_n: int, *, floating: bool) -> Any:
    """An intrinsic (x, w, K, out): out[m * num_n + n] = sum over K of x[m] * w[n].

    x and w are addresses of row-major rows of K items: int16 and int8, or float32 and bfloat16.
    """
    lanes = TILE_K // 2
    scalar = _F32 if floating else _I32
    x_size, w_size = (4, 2) if floating else (2, 1)

    def codegen(_context: Any, b: ir.IRBuilder, _signature: Any, args: list[_Value]) -> _Value:
        x, w, size_k, out = args
        accumulator = ir.VectorType(scalar, lanes)
        entry = b.block
        loop, done = b.append_basic_block("tile.loop"), b.append_basic_block("tile.done")
        b.branch(loop)
        b.position_at_end(loop)
        k = b.phi(_I64)
        k.add_incoming(_index(0), entry)
        sums = [[b.phi(accumulator) for _ in range(num_n)] for _ in range(num_m)]

        def addresses(base: _Value, count: int, size: int, offset: int) -> list[_Value]:
            at = b.add(k, _index(offset))
            rows = [b.add(b.mul(size_k, _index(i)), at) for i in range(count)]
            return [b.add(base, b.mul(row, _index(size))) for row in rows]

        step = _bf16_step if floating else _int8_step
        new = step(
            b, partial(addresses, x, num_m, x_size), partial(addresses, w, num_n, w_size), sums
        )
        next_k = b.add(k, _index(TILE_K))
        k.add_incoming(next_k, loop)
        for m in range(num_m):
            for n in range(num_n):
                sums[m][n].add_incoming(ir.Constant(accumulator, None), entry)
                sums[m][n].add_incoming(new[m][n], loop)
        b.cbranch(b.icmp_signed("<", next_k, size_k), loop, done)
        b.position_at_end(done)
        pointer = b.inttoptr(out, scalar.as_pointer())
        add = b.fadd if floating else b.add
        for m in range(num_m):
            for n in range(num_n):
                target = b.gep(pointer, [_index(m * num_n + n)])
                b.store(_sum_lanes(b, new[m][n], add), target)
        return _context.get_dummy_value()

    @intrinsic
    def tile(_typing: Any, _x: Any, _w: Any, _k: Any, _out: Any) -> Any:
        return types.void(types.intp, types.intp, types.intp, types.intp), codegen

    return tile


def _mix_intrinsic(num_m: int) -> Any:
    """An intrinsic (weights, stride, values, D, count, out): out[m] = sum over j of weights[m, j] v[j].

    weights: float32 rows `stride` items apart; values: bfloat16 rows of D items; out: float32 rows of
    D items. Handles TILE_K items of D from the addresses given; j runs from 0 to count - 1, in order.
    """
    lanes = TILE_K // 2
    vector, bits_type = ir.VectorType(_F32, lanes), ir.VectorType(_I16, lanes)

    def codegen(_context: Any, b: ir.IRBuilder, _signature: Any, args: list[_Value]) -> _Value:
        weights, stride, values, size_d, count, out = args
        entry = b.block
        loop, done = b.append_basic_block("mix.loop"), b.append_basic_block("mix.done")
        b.branch(loop)
        b.position_at_end(loop)
        j = b.phi(_I64)
        j.add_incoming(_index(0), entry)
        sums = [[b.phi(vector) for _ in range(2)] for _ in range(num_m)]
        row = b.add(values, b.mul(b.mul(j, size_d), _index(2)))
        halves = [_load(b, [b.add(row, _index(2 * lanes * h))], bits_type)[0] for h in range(2)]
        v = [_widen_bf16(b, bits, lanes) for bits in halves]
        next_j = b.add(j, _index(1))
        for m in range(num_m):
            at = b.add(weights, b.mul(b.add(b.mul(stride, _index(m)), j), _index(4)))
            weight = b.load(b.inttoptr(at, _F32.as_pointer()))
            one = b.insert_element(ir.Constant(vector, ir.Undefined), weight, ir.Constant(_I32, 0))
            zeros = ir.Constant(ir.VectorType(_I32, lanes), None)
            spread = b.shuffle_vector(one, one, zeros)
            for h in range(2):
                sums[m][h].add_incoming(ir.Constant(vector, None), entry)
                sums[m][h].add_incoming(_fma(b, spread, v[h], sums[m][h]), loop)
        j.add_incoming(next_j, loop)
        b.cbranch(b.icmp_signed("<", next_j, count), loop, done)
        b.position_at_end(done)
        for m in range(num_m):
            for h in range(2):
                at = b.add(b.mul(size_d, _index(m)), _index(lanes * h))
                pointer = b.inttoptr(b.add(out, b.mul(at, _index(4))), vector.as_pointer())
                final = next(value for value, block in sums[m][h].incomings if block is loop)
                b.store(final, pointer, align=4)
        return _context.get_dummy_value()

    @intrinsic
    def mix(_typing: Any, _w: Any, _s: Any, _v: Any, _d: Any, _c: Any, _o: Any) -> Any:
        return types.void(*[types.intp] * 6), codegen

    return mix


score_tiles = tuple(_tile_intrinsic(m, _TILE_N, floating=True) for m in (1, 2, 3, 4))
mix_tiles = tuple(_mix_intrinsic(m) for m in (1, 2, 3, 4))
_int8_4x2 = _tile_intrinsic(_TILE_M, _TILE_N, floating=False)
_int8_1x2 = _tile_intrinsic(1, _TILE_N, floating=False)
_bf16_4x2 = score_tiles[3]
_bf16_1x2 = score_tiles[0]


@numba.njit(parallel=True, nogil=True, cache=True)
def matmul_int8(x_MK, x_scale_M, w_NK, w_scale_N, bias_N, out_MN):  # type: ignore[no-untyped-def]
    """Set out = (x @ w.T) * w_scale * x_scale + bias, the sums exact in int32.

    int16 codes [M, K] with float32 scales [M]; int8 codes [N, K] with float32 scales [N]; float32
    bias [N] or [0]; float32 out [M, N]. K must be a multiple of TILE_K, N at least 2.
    """
    M, K = x_MK.shape
    N = w_NK.shape[0]
    x, w = x_MK.ctypes.data, w_NK.ctypes.data
    biased = bias_N.size > 0
    for block in prange((N + _BLOCK_N - 1) // _BLOCK_N):
        sums = np.empty(_TILE_M * _TILE_N, np.int32)
        for m_block in range(0, M, _BLOCK_M):
            m_end = min(M, m_block + _BLOCK_M)
            for n_at in range(block * _BLOCK_N, min(N, (block + 1) * _BLOCK_N), _TILE_N):
                n0 = min(n_at, N - _TILE_N)
                m0 = m_block
                while m0 < m_end:
                    if m_end - m0 >= _TILE_M:
                        rows = _TILE_M
                        _int8_4x2(x + m0 * K * 2, w + n0 * K, K, sums.ctypes.data)
                    else:
                        rows = 1
                        _int8_1x2(x + m0 * K * 2, w + n0 * K, K, sums.ctypes.data)
                    for i in range(rows):
                        for j in range(_TILE_N):
                            m, n = m0 + i, n0 + j
                            y = np.float32(sums[i * _TILE_N + j]) * w_scale_N[n] * x_scale_M[m]
                            out_MN[m, n] = y + bias_N[n] if biased else y
                    m0 += rows


@numba.njit(parallel=True, nogil=True, cache=True)
def matmul_bf16(x_MK, w_NK, bias_N, out_MN):  # type: ignore[no-untyped-def]
    """Set out = x @ w.T + bias for float32 x [M, K] and bfloat16 (as uint16) w [N, K].

    float32 bias [N] or [0]; float32 out [M, N]. K must be a multiple of TILE_K, N at least 2.
    """
    M, K = x_MK.shape
    N = w_NK.shape[0]
    x, w = x_MK.ctypes.data, w_NK.ctypes.data
    biased = bias_N.size > 0
    for block in prange((N + _BLOCK_N - 1) // _BLOCK_N):
        sums = np.empty(_TILE_M * _TILE_N, np.float32)
        for m_block in range(0, M, _BLOCK_M):
            m_end = min(M, m_block + _BLOCK_M)
            for n_at in range(block * _BLOCK_N, min(N, (block + 1) * _BLOCK_N), _TILE_N):
                n0 = min(n_at, N - _TILE_N)
                m0 = m_block
                while m0 < m_end:
                    if m_end - m0 >= _TILE_M:
                        rows = _TILE_M
                        _bf16_4x2(x + m0 * K * 4, w + n0 * K * 2, K, sums.ctypes.data)
                    else:
                        rows = 1
                        _bf16_1x2(x + m0 * K * 4, w + n0 * K * 2, K, sums.ctypes.data)
                    for i in range(rows):
                        for j in range(_TILE_N):
                            y = sums[i * _TILE_N + j]
                            out_MN[m0 + i, n0 + j] = y + bias_N[n0 + j] if biased else y
                    m0 += rows
