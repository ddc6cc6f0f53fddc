"""Register tiles for the CPU, written in LLVM's vector form through llvmlite.

A tile computes the products of a few token rows with a few weight rows over all inputs at once. Each
(token, output) pair is summed in the same order whatever tile it falls into and whoever shares the
pass, so a token's result has the same bits alone and in company.

Why our own: on x86 without VNNI, oneDNN's u8 x s8 kernels add pairs of products in saturating int16
and return wrong sums without a word, and torch._int_mm falls to a reference loop. Here int8 weights
meet int16 activation codes in `pmaddwd`: exact, portable, at the memory floor for few rows, and on
weights in place, in the order `quant.int8.pack` gives them, so that the actors of a node share one copy.

Legend: M tokens, N outputs, K inputs.
"""

from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from quant.int8 import PACK_K, PACK_N, PACK_STEP

TILE_K = 16  # Inputs per step of a floating tile; both operands are padded to a multiple.
TILE_N = 2  # Outputs of a floating tile.
TILE_M = 4  # Tokens of the largest tile.
_HAS_AVX512 = bool(llvmlite.binding.get_host_cpu_features().get("avx512f"))
_AHEAD = 64  # Rows that a mixing tile asks for ahead: at the end of a page the CPU does not.
VECTOR = 16 if _HAS_AVX512 else 8  # float32 of a register.
MIX_LANES = 32  # Outputs of a mixing tile,
MIX_ROWS = 6 if _HAS_AVX512 else 3  # and the rows whose sums fit the registers.

_I8, _I16, _I32, _I64, _F32 = (*(ir.IntType(n) for n in (8, 16, 32, 64)), ir.FloatType())
_LANES = 8
assert TILE_M * TILE_N == _LANES
_Value = Any  # llvmlite is untyped.


def load(b: ir.IRBuilder, address: _Value, vector: ir.VectorType) -> _Value:
    """The vector at an address, wherever that is."""
    return b.load(b.inttoptr(address, vector.as_pointer()), align=1)


def prefetch(b: ir.IRBuilder, address: _Value) -> None:
    """Ask for the cache line at an address, which need not exist."""
    pointer = _I8.as_pointer()
    function = b.module.declare_intrinsic(
        "llvm.prefetch", (pointer,), ir.FunctionType(ir.VoidType(), [pointer, _I32, _I32, _I32])
    )
    read, keep, data = (ir.Constant(_I32, value) for value in (0, 3, 1))
    b.call(function, [b.inttoptr(address, pointer), read, keep, data])


def store(b: ir.IRBuilder, value: _Value, address: _Value) -> None:
    """Write to an address of items of four bytes."""
    b.store(value, b.inttoptr(address, value.type.as_pointer()), align=4)


def spread(b: ir.IRBuilder, value: _Value, lanes: int) -> _Value:
    """A vector with the value in every lane."""
    vector = ir.VectorType(value.type, lanes)
    one = b.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(_I32, 0))
    return b.shuffle_vector(one, one, ir.Constant(ir.VectorType(_I32, lanes), None))


def _add_pairs(b: ir.IRBuilder, left: _Value, right: _Value) -> _Value:
    """Sums of neighbouring lanes of two vectors, those of the left one first."""
    lanes = left.type.count
    pick = ir.VectorType(_I32, lanes)
    even, odd = (
        b.shuffle_vector(left, right, ir.Constant(pick, list(range(start, 2 * lanes, 2))))
        for start in (0, 1)
    )
    return b.fadd(even, odd) if left.type.element == _F32 else b.add(even, odd)


def _widen_bf16(b: ir.IRBuilder, bits: _Value) -> _Value:
    """float32 lanes from bfloat16 lanes, given as int16."""
    wide = ir.VectorType(_I32, bits.type.count)
    shift = ir.Constant(wide, [16] * bits.type.count)
    return b.bitcast(b.shl(b.zext(bits, wide), shift), ir.VectorType(_F32, bits.type.count))


def _fma(b: ir.IRBuilder, x: _Value, y: _Value, z: _Value) -> _Value:
    """Vectors x * y + z, rounded once."""
    name = f"llvm.fma.v{x.type.count}f32"
    function = b.module.globals.get(name)
    if function is None:
        function = ir.Function(b.module, ir.FunctionType(x.type, [x.type] * 3), name)
    return b.call(function, [x, y, z])


def index(value: int) -> _Value:
    """An address-sized constant."""
    return ir.Constant(_I64, value)


def _sum_lanes(b: ir.IRBuilder, vectors: list[_Value]) -> _Value:
    """The sums of up to _LANES vectors, in one vector: neighbours first, the same for each of them."""
    vectors = vectors + [vectors[-1]] * (_LANES - len(vectors))
    while len(vectors) > 1:
        vectors = [
            _add_pairs(b, left, right)
            for left, right in zip(vectors[::2], vectors[1::2], strict=True)
        ]
    return vectors[0]


def _halved(b: ir.IRBuilder, vector: _Value) -> _Value:
    """A vector of _LANES lanes: the sums of a longer one's halves."""
    if vector.type.count == _LANES:
        return vector
    parts = (ir.Constant(ir.VectorType(_I32, _LANES), [*range(i, i + _LANES)]) for i in (0, _LANES))
    return b.fadd(*(b.shuffle_vector(vector, vector, part) for part in parts))


class Loop:
    """A counted loop of values that take a new one in every round."""

    def __init__(self, b: ir.IRBuilder, name: str) -> None:
        self._b, self._entry = b, b.block
        self._body, self._done = (b.append_basic_block(f"{name}.{s}") for s in ("loop", "done"))
        b.branch(self._body)
        b.position_at_end(self._body)
        self.index = b.phi(_I64)
        self.index.add_incoming(index(0), self._entry)

    def zeros(self, vector: ir.VectorType) -> _Value:
        """A vector that is zero in the first round."""
        return self.value(ir.Constant(vector, None))

    def value(self, first: _Value) -> _Value:
        """What is `first` in the first round."""
        value = self._b.phi(first.type)
        value.add_incoming(first, self._entry)
        return value

    def close(self, step: int, end: _Value, new: dict[_Value, _Value]) -> None:
        """Go round again with the new values while index + step is below end; at least one round."""
        following = self._b.add(self.index, index(step))
        for value, new_value in [(self.index, following), *new.items()]:
            value.add_incoming(new_value, self._body)
        self._b.cbranch(self._b.icmp_signed("<", following, end), self._body, self._done)
        self._b.position_at_end(self._done)


def _int8_tile(num_m: int) -> Any:
    """An intrinsic (x, w, K, ahead, shift, out): out[m, n] = sum over K of x[m] * w[n], exact in int32.

    x: address of int16 rows of K items; w: of one block of packed int8 weights (see quant.int8.pack);
    out: of int32 rows of PACK_N items, of which the tile does PACK_N, or half from the addresses given
    where more would not fit the registers. K is a multiple of PACK_STEP. On its way the tile asks for one
    in 2 ** shift of as many cache lines as it reads itself, from the address `ahead` on.
    """
    group = _LANES // 2  # Outputs per vector: each has two lanes, for two pairs of inputs.
    num_groups = int8_outputs(num_m) // group
    codes, weights = ir.VectorType(_I16, 2 * _LANES), ir.VectorType(_I8, 2 * _LANES)
    wide = ir.VectorType(_I32, 2 * _LANES)
    halves = ir.VectorType(_I32, _LANES)
    even, odd = (ir.Constant(halves, list(range(start, 2 * _LANES, 2))) for start in (0, 1))

    def codegen(context: Any, b: ir.IRBuilder, _signature: Any, args: list[_Value]) -> _Value:
        x, w, size_k, ahead, shift, out = args
        loop = Loop(b, "int8")
        first = [[loop.zeros(halves) for _ in range(num_groups)] for _ in range(num_m)]
        sums = [list(row) for row in first]
        for offset in range(0, PACK_STEP, PACK_K):
            k = b.add(loop.index, index(offset))
            if offset == 0 or num_groups == PACK_N // group:
                line = b.lshr(b.udiv(k, index(PACK_K)), shift)
                prefetch(b, b.add(ahead, b.mul(line, index(PACK_N * PACK_K))))
            cell = b.add(w, b.mul(k, index(PACK_N)))
            w_wide = [
                b.sext(b.sext(load(b, b.add(cell, index(16 * g)), weights), codes), wide)
                for g in range(num_groups)
            ]
            for m in range(num_m):
                at = b.add(x, b.mul(b.add(b.mul(size_k, index(m)), k), index(2)))
                quad = b.load(b.inttoptr(at, _I64.as_pointer()), align=2)
                x_wide = b.sext(b.bitcast(spread(b, quad, _LANES // 2), codes), wide)
                for g in range(num_groups):  # A product and the sum of its pairs: pmaddwd to LLVM.
                    product = b.mul(x_wide, w_wide[g])
                    left, right = (b.shuffle_vector(product, product, p) for p in (even, odd))
                    sums[m][g] = b.add(sums[m][g], b.add(left, right))
        new = {first[m][g]: sums[m][g] for m in range(num_m) for g in range(num_groups)}
        loop.close(PACK_STEP, size_k, new)
        for m in range(num_m):
            for g in range(0, num_groups, 2):
                total = _add_pairs(b, sums[m][g], sums[m][g + 1])
                store(b, total, b.add(out, index(4 * (m * PACK_N + g * group))))
        return context.get_dummy_value()

    @intrinsic
    def tile(_typing: Any, _x: Any, _w: Any, _k: Any, _ahead: Any, _shift: Any, _out: Any) -> Any:
        return types.void(*[types.intp] * 6), codegen

    return tile


def int8_outputs(num_m: int) -> int:
    """How many outputs of a block the int8 tile of `num_m` tokens does at once."""
    return PACK_N if num_m <= 2 else PACK_N // 2


def _float_tile(num_m: int) -> Any:
    """An intrinsic (x, w, K, out): out[m * TILE_N + n] = sum over K of x[m] * w[n].

    x and w are addresses of row-major rows of K items, float32 and bfloat16; K a multiple of TILE_K. out
    has room for TILE_M * TILE_N items, and what the tile does not compute of them is left undefined.
    """
    vector = ir.VectorType(_F32, VECTOR)

    def codegen(context: Any, b: ir.IRBuilder, _signature: Any, args: list[_Value]) -> _Value:
        x, w, size_k, out = args
        loop = Loop(b, "float")
        first = [[loop.zeros(vector) for _ in range(TILE_N)] for _ in range(num_m)]

        def rows(base: _Value, count: int, size: int, lane_type: Any, offset: int) -> list[_Value]:
            at = b.add(loop.index, index(offset))
            items = [b.add(b.mul(size_k, index(i)), at) for i in range(count)]
            addresses = [b.add(base, b.mul(item, index(size))) for item in items]
            return [load(b, address, ir.VectorType(lane_type, VECTOR)) for address in addresses]

        sums = first
        for offset in range(0, TILE_K, VECTOR):
            x_rows = rows(x, num_m, 4, _F32, offset)
            w_rows = [_widen_bf16(b, bits) for bits in rows(w, TILE_N, 2, _I16, offset)]
            sums = [
                [_fma(b, x_m, w_n, total) for total, w_n in zip(row, w_rows, strict=True)]
                for row, x_m in zip(sums, x_rows, strict=True)
            ]
        loop.close(
            TILE_K, size_k, {first[m][n]: sums[m][n] for m in range(num_m) for n in range(TILE_N)}
        )
        store(b, _sum_lanes(b, [_halved(b, total) for row in sums for total in row]), out)
        return context.get_dummy_value()

    @intrinsic
    def tile(_typing: Any, _x: Any, _w: Any, _k: Any, _out: Any) -> Any:
        return types.void(types.intp, types.intp, types.intp, types.intp), codegen

    return tile


def _mix_tile(num_m: int) -> Any:
    """An intrinsic (a, a_stride, b, b_stride, count, fresh, out, out_stride), for MIX_LANES outputs:

    out[m] = sum over j of a[m, j] * b[j], or that is added to out unless `fresh`. Addresses, and strides
    in items: a and out are float32 rows, b is bfloat16 rows. j runs from 0 to count - 1, in order, so
    that a sum may be continued later, and count is at least 1.
    """
    vector, bits = ir.VectorType(_F32, VECTOR), ir.VectorType(_I16, VECTOR)
    offsets = range(0, MIX_LANES, VECTOR)

    def codegen(context: Any, b: ir.IRBuilder, _signature: Any, args: list[_Value]) -> _Value:
        weights, stride, rows, row_stride, count, fresh, out, out_stride = args
        places = [
            [
                b.add(out, b.mul(b.add(b.mul(out_stride, index(m)), index(offset)), index(4)))
                for offset in offsets
            ]
            for m in range(num_m)
        ]
        begins_at_zero, zero = b.icmp_signed("!=", fresh, index(0)), ir.Constant(vector, None)
        start = [
            [b.select(begins_at_zero, zero, load(b, place, vector)) for place in row]
            for row in places
        ]
        loop = Loop(b, "mix")
        sums = [[loop.value(first) for first in row] for row in start]
        row = b.add(rows, b.mul(b.mul(loop.index, row_stride), index(2)))
        prefetch(b, b.add(row, b.mul(row_stride, index(2 * _AHEAD))))
        b_row = [_widen_bf16(b, load(b, b.add(row, index(2 * offset)), bits)) for offset in offsets]
        new = {}
        for m in range(num_m):
            at = b.add(b.mul(stride, index(m)), loop.index)
            address = b.add(weights, b.mul(at, index(4)))
            weight = spread(b, b.load(b.inttoptr(address, _F32.as_pointer())), VECTOR)
            for total, lanes in zip(sums[m], b_row, strict=True):
                new[total] = _fma(b, weight, lanes, total)
        loop.close(1, count, new)
        for m in range(num_m):
            for total, place in zip(sums[m], places[m], strict=True):
                store(b, new[total], place)
        return context.get_dummy_value()

    @intrinsic
    def mix(
        _typing: Any, _a: Any, _as: Any, _b: Any, _bs: Any, _n: Any, _f: Any, _o: Any, _os: Any
    ) -> Any:
        return types.void(*[types.intp] * 8), codegen

    return mix


# Each for one row and more.
int8_tiles, float_tiles = (
    tuple(make(num_m) for num_m in range(1, TILE_M + 1)) for make in (_int8_tile, _float_tile)
)
mix_tiles = tuple(_mix_tile(num_m) for num_m in range(1, 7))
