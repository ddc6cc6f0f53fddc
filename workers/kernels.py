"""Row kernels for the CPU: norms, activations, quantization.

Every kernel walks its rows one by one with the same instructions, so that no result depends on the
other rows of the pass (vectorized library calls treat the tail of an array differently from its
body). float32 throughout; bfloat16 is held as uint16.
"""

import numpy as np
from llvmlite import ir
from numba import prange, types
from numba.extending import intrinsic

from workers.jit import inlined, kernel, parallel_kernel

# For loops that sum and do nothing else: vectorized, they always sum in the same order. No other loop may
# be rearranged: LLVM makes two of it, chosen between by where arrays lie, and they would not round alike.
SUM = {"reassoc", "nsz", "contract", "arcp"}
_LOG2_E = np.float32(1.4426950408889634)
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_NO_SIGN, _INFINITY = np.int32(0x7FFFFFFF), np.int32(0x7F800000)  # Of a float32's bits.


def _bitcast(source: types.Type, target: types.Type, target_ir: ir.Type):  # type: ignore[no-untyped-def]
    @intrinsic
    def cast(_typing, _value):  # type: ignore[no-untyped-def]
        def codegen(_context, builder, _signature, args):  # type: ignore[no-untyped-def]
            return builder.bitcast(args[0], target_ir)

        return target(source), codegen

    return cast


as_float = _bitcast(types.int32, types.float32, ir.FloatType())
as_int = _bitcast(types.float32, types.int32, ir.IntType(32))


def _fused():  # type: ignore[no-untyped-def]
    @intrinsic
    def fma(_typing, _x, _y, _z):  # type: ignore[no-untyped-def]
        def codegen(_context, builder, _signature, args):  # type: ignore[no-untyped-def]
            return builder.fma(*args)

        return types.float32(types.float32, types.float32, types.float32), codegen

    return fma


_fma = _fused()  # type: ignore[no-untyped-call]  # x * y + z, rounded once whatever loop it stands in.


@inlined()
def from_bf16(bits):  # type: ignore[no-untyped-def]
    """Widen bfloat16 bits to float32."""
    return as_float(np.int32(np.int32(bits) << np.int32(16)))


@inlined()
def to_bf16(value):  # type: ignore[no-untyped-def]
    """Round to nearest, ties to even."""
    bits = as_int(value)
    return np.uint16((bits + np.int32(0x7FFF) + ((bits >> 16) & 1)) >> 16)


@inlined()
def exp(x):  # type: ignore[no-untyped-def]
    """Compute exp in float32, branch-free so that loops vectorize (Cephes' expf; 2 ulp)."""
    x = min(max(x, np.float32(-87.3)), np.float32(88.3))
    n = np.float32(np.floor(_fma(x, _LOG2_E, np.float32(0.5))))
    r = _fma(n, -_LN2_LOW, _fma(n, -_LN2_HIGH, x))
    p = _fma(np.float32(1.9875691500e-4), r, np.float32(1.3981999507e-3))
    p = _fma(p, r, np.float32(8.3334519073e-3))
    p = _fma(p, r, np.float32(4.1665795894e-2))
    p = _fma(p, r, np.float32(1.6666665459e-1))
    p = _fma(p, r, np.float32(5.0000001201e-1))
    y = _fma(p, r * r, r) + np.float32(1.0)
    return y * as_float(np.int32((np.int32(n) + np.int32(127)) << np.int32(23)))


@parallel_kernel()
def quantize_rows(x_MK, max_code, codes_MK, scale_M):  # type: ignore[no-untyped-def]
    """Symmetric codes (int8 or int16) and scales (float32) of each row; see quant.int8.

    codes may be wider than x; the padding is set to zero.
    """
    M, K = x_MK.shape
    limit = np.float32(max_code)
    for m in prange(M):
        most = np.int32(0)  # As bits, which are in the order of the floats, NaN above all of them.
        for k in range(K):
            most = max(most, np.int32(as_int(x_MK[m, k]) & _NO_SIGN))
        finite = most < _INFINITY
        # NaN or infinity: the scale carries it to every output of the row.
        scale = (as_float(most) if finite else np.float32(np.nan)) / limit
        if scale == 0:  # A row of zeros, or so small that its scale is: its codes are zeros.
            scale = np.float32(1)
        scale_M[m] = scale
        for k in range(K):
            code = np.rint(x_MK[m, k] / scale) if finite else np.float32(0)
            codes_MK[m, k] = np.int16(min(max(code, -limit), limit))
        for k in range(K, codes_MK.shape[1]):
            codes_MK[m, k] = 0


@parallel_kernel()
def round_rows(x_MK, out_MK):  # type: ignore[no-untyped-def]
    """Round to bfloat16 (kept as float32); out may be wider than x, the padding is set to zero."""
    M, K = x_MK.shape
    for m in prange(M):
        for k in range(K):
            out_MK[m, k] = from_bf16(to_bf16(x_MK[m, k]))
        for k in range(K, out_MK.shape[1]):
            out_MK[m, k] = 0


@kernel(fastmath=SUM)
def _sum_of_squares(x_K):  # type: ignore[no-untyped-def]
    total = np.float32(0)
    for k in range(x_K.size):
        total += x_K[k] * x_K[k]
    return total


@kernel()
def norm_row(x_K, gain_K, eps, out_K):  # type: ignore[no-untyped-def]
    """Set out = x / sqrt(mean(x ** 2) + eps) * gain."""
    mean = _sum_of_squares(x_K) / np.float32(x_K.size)
    inverse = np.float32(1) / np.sqrt(mean + np.float32(eps))
    for k in range(x_K.size):
        out_K[k] = x_K[k] * inverse * gain_K[k]


@parallel_kernel()
def rms_norm(x_MK, gain_K, eps, out_MK):  # type: ignore[no-untyped-def]
    """Do as `norm_row` for every row."""
    for m in prange(x_MK.shape[0]):
        norm_row(x_MK[m], gain_K, eps, out_MK[m])


@parallel_kernel()
def silu_mul(gate_up_MJ, out_MI):  # type: ignore[no-untyped-def]
    """Set out = gate * sigmoid(gate) * up for rows that hold gate, then up."""
    M, I = out_MI.shape  # noqa: E741
    for m in prange(M):
        for i in range(I):
            gate = gate_up_MJ[m, i]
            out_MI[m, i] = gate / (np.float32(1) + exp(-gate)) * gate_up_MJ[m, I + i]
