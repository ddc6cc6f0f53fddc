"""The register tile of int8 products for x86 CPUs with AVX512-VNNI.

`vpdpbusd` adds four products of unsigned and signed bytes to an int32 without rounding or saturating on
the way, so this tile gives the very sums of `workers.tiles`, at twice its speed or more by the
instruction's width. Weights take the unsigned side (128 is added to each as it is loaded, where a packed
cell is one register), so the sums are too large by 128 times the sum of the token's codes, which whoever
uses them takes off again.

Activations of two bytes take two of the tile's rows, a byte each; `workers.matmul` puts their sums
together again.

Where there is no such instruction the tile is made of plain ones: slow, and what the tests run.

Legend: M tokens, N outputs, K inputs.
"""

from itertools import product
from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from quant.int8 import PACK_K, PACK_N, PACK_STEP
from workers.tiles import Loop, index, load, prefetch, spread, store

TILE_M = 8  # Tokens of the largest tile.
TILE_N = 2 * PACK_N  # Outputs: two blocks, for more products a round.
OFFSET = 128  # What is added to the weights.

_I8, _I32 = ir.IntType(8), ir.IntType(32)
_BYTES, _SUMS = ir.VectorType(_I8, PACK_N * PACK_K), ir.VectorType(_I32, PACK_N)
_WIDE = ir.VectorType(_I32, PACK_N * PACK_K)
_LINE = PACK_N * PACK_K  # Bytes of a packed cell, and of a cache line.
_Value = Any  # llvmlite is untyped.

HAS_VNNI = bool(llvmlite.binding.get_host_cpu_features().get("avx512vnni"))


def vnni_dot(b: ir.IRBuilder, sums: _Value, unsigned: _Value, signed: _Value) -> _Value:
    """One instruction: sums [N] of int32 plus the products of each output's four pairs of bytes."""
    name = "llvm.x86.avx512.vpdpbusd.512"
    function = b.module.globals.get(name)
    if function is None:
        function = ir.Function(b.module, ir.FunctionType(_SUMS, [_SUMS, _BYTES, _BYTES]), name)
    return b.call(function, [sums, unsigned, signed])


def plain_dot(b: ir.IRBuilder, sums: _Value, unsigned: _Value, signed: _Value) -> _Value:
    """The same by any CPU's instructions."""
    products = b.mul(b.zext(unsigned, _WIDE), b.sext(signed, _WIDE))
    for start in range(PACK_K):
        lanes = list(range(start, PACK_N * PACK_K, PACK_K))
        picked = b.shuffle_vector(products, products, ir.Constant(_SUMS, lanes))
        sums = b.add(sums, picked)
    return sums


def build_tile(b: ir.IRBuilder, num_m: int, args: list[_Value], dot: Any) -> None:
    """Emit out[m, n] = sum over K of x[m] * (w[n] + OFFSET), for `num_m` tokens and TILE_N outputs.

    x: address of int8 rows of K items, K a multiple of PACK_STEP; w, w_next: of two blocks of packed int8
    weights (see quant.int8.pack); ahead, shift: one in 2 ** shift of as many cache lines as the tile
    reads is asked for from `ahead` on; out: address of int32 rows of TILE_N items.
    """
    x, w, w_next, size_k, ahead, shift, out = args
    loop = Loop(b, "vnni")
    blocks = (w, w_next)
    first = [[loop.zeros(_SUMS) for _ in blocks] for _ in range(num_m)]
    sums = [list(row) for row in first]
    line = b.udiv(loop.index, index(PACK_K // len(blocks)))
    for number, (offset, block) in enumerate(product(range(0, PACK_STEP, PACK_K), blocks)):
        k = b.add(loop.index, index(offset))
        at_line = b.lshr(b.add(line, index(number)), shift)
        prefetch(b, b.add(ahead, b.mul(at_line, index(_LINE))))
        codes = load(b, b.add(block, b.mul(k, index(PACK_N))), _BYTES)
        unsigned = b.xor(codes, ir.Constant(_BYTES, [-128] * _BYTES.count))
        n = number % len(blocks)
        for m in range(num_m):
            at = b.add(x, b.add(b.mul(size_k, index(m)), k))
            quad = b.load(b.inttoptr(at, _I32.as_pointer()), align=1)
            signed = b.bitcast(spread(b, quad, PACK_N), _BYTES)
            sums[m][n] = dot(b, sums[m][n], unsigned, signed)
    new = {first[m][n]: sums[m][n] for m in range(num_m) for n in range(len(blocks))}
    loop.close(PACK_STEP, size_k, new)
    for m in range(num_m):
        for n in range(len(blocks)):
            store(b, sums[m][n], b.add(out, index(4 * (TILE_N * m + PACK_N * n))))


def _tile(num_m: int) -> Any:
    dot = vnni_dot if HAS_VNNI else plain_dot

    def codegen(context: Any, b: ir.IRBuilder, _signature: Any, args: list[_Value]) -> _Value:
        build_tile(b, num_m, args, dot)
        return context.get_dummy_value()

    @intrinsic
    def tile(
        _typing: Any, _x: Any, _w: Any, _next: Any, _k: Any, _ahead: Any, _shift: Any, _out: Any
    ) -> Any:
        return types.void(*[types.intp] * 7), codegen

    return tile


vnni_tiles = tuple(_tile(num_m) for num_m in range(1, TILE_M + 1))
