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
NO_SIGN, _INFINITY = np.int32(0x7FFFFFFF), np.int32(0x7F800000)  # Of a float32's bits.


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


@kernel()
def _quantize_row(x_K, limit, codes_K):  # type: ignore[no-untyped-def]
    """Write the codes, and zeros where there are more of them than items; returns the scale."""
    most = np.int32(0)  # As bits, which are in the order of the floats, NaN above all of them.
    for k in range(x_K.size):
        most = max(most, np.int32(as_int(x_K[k]) & NO_SIGN))
    finite = most < _INFINITY
    # NaN or infinity: the scale carries it to every output of the row.
    scale = (as_float(most) if finite else np.float32(np.nan)) / limit
    if scale == 0:  # A row of zeros, or so small that its scale is: its codes are zeros.
        scale = np.float32(1)
    for k in range(x_K.size):
        code = np.rint(x_K[k] / scale) if finite else np.float32(0)
        codes_K[k] = np.int16(min(max(code, -limit), limit))
    for k in range(x_K.size, codes_K.size):
        codes_K[k] = 0
    return scale


@parallel_kernel()
def quantize_rows(x_MK, max_code, codes_MK, scale_M):  # type: ignore[no-untyped-def]
    """Symmetric codes (int8 or int16) and scales (float32) of each row; see quant.int8.

    codes may be wider than x; the padding is set to zero.
    """
    for m in prange(x_MK.shape[0]):
        scale_M[m] = _quantize_row(x_MK[m], np.float32(max_code), codes_MK[m])


@parallel_kernel()
def quantize_gated_rows(gate_up_MJ, max_code, codes_MI, scale_M):  # type: ignore[no-untyped-def]
    """As `quantize_rows`, of gate * sigmoid(gate) * up for rows that hold gate, then up."""
    size = gate_up_MJ.shape[1] // 2
    for m in prange(gate_up_MJ.shape[0]):
        h_I = np.empty(size, np.float32)
        _silu_row(gate_up_MJ[m], h_I)
        scale_M[m] = _quantize_row(h_I, np.float32(max_code), codes_MI[m])


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


@kernel()
def _silu_row(gate_up_J, out_I):  # type: ignore[no-untyped-def]
    gate_I, up_I = gate_up_J[: out_I.size], gate_up_J[out_I.size :]
    for i in range(out_I.size):
        out_I[i] = gate_I[i] / (np.float32(1) + exp(-gate_I[i])) * up_I[i]


@parallel_kernel()
def silu_mul(gate_up_MJ, out_MI):  # type: ignore[no-untyped-def]
    """Set out = gate * sigmoid(gate) * up for rows that hold gate, then up."""
    for m in prange(out_MI.shape[0]):
        _silu_row(gate_up_MJ[m], out_MI[m])
