"""Row kernels for the CPU: norms, activations, rotary embeddings, quantization and attention.

Every kernel walks its rows one by one with the same instructions, so that no result depends on the
other rows of the pass (vectorized library calls treat the tail of an array differently from its
body). float32 throughout; the cache holds bfloat16, as uint16.
"""

import math

import numba
import numpy as np
from llvmlite import ir
from numba import prange, types
from numba.extending import intrinsic

# Sums may be vectorized; NaN and infinity keep their meaning, so that a broken row is seen.
_FAST = {"reassoc", "nsz", "contract", "arcp"}
_LOG2_E = np.float32(1.4426950408889634)
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)


def _bitcast(source: types.Type, target: types.Type, target_ir: ir.Type):  # type: ignore[no-untyped-def]
    @intrinsic
    def cast(_typing, _value):  # type: ignore[no-untyped-def]
        def codegen(_context, builder, _signature, args):  # type: ignore[no-untyped-def]
            return builder.bitcast(args[0], target_ir)

        return target(source), codegen

    return cast


_as_float = _bitcast(types.int32, types.float32, ir.FloatType())
_as_int = _bitcast(types.float32, types.int32, ir.IntType(32))


@numba.njit(inline="always")
def _from_bf16(bits):  # type: ignore[no-untyped-def]
    return _as_float(np.int32(np.int32(bits) << np.int32(16)))


@numba.njit(inline="always")
def _to_bf16(value):  # type: ignore[no-untyped-def]
    """Round to nearest, ties to even."""
    bits = _as_int(value)
    return np.uint16((bits + np.int32(0x7FFF) + ((bits >> 16) & 1)) >> 16)


@numba.njit(inline="always", fastmath=_FAST)
def _exp(x):  # type: ignore[no-untyped-def]
    """Compute exp in float32, branch-free so that loops vectorize (Cephes' expf; 2 ulp)."""
    x = min(max(x, np.float32(-87.3)), np.float32(88.3))
    n = np.float32(np.floor(x * _LOG2_E + np.float32(0.5)))
    r = x - n * _LN2_HIGH - n * _LN2_LOW
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    y = p * r * r + r + np.float32(1.0)
    return y * _as_float(np.int32((np.int32(n) + np.int32(127)) << np.int32(23)))


@numba.njit(parallel=True, nogil=True, cache=True)
def quantize_rows(x_MK, max_code, codes_MK, scale_M):  # type: ignore[no-untyped-def]
    """Symmetric codes (int16) and scales (float32) of each row; see quant.int8.

    codes may be wider than x; the padding is set to zero.
    """
    M, K = x_MK.shape
    for m in prange(M):
        largest = np.float32(0)
        finite = True
        for k in range(K):
            value = abs(x_MK[m, k])
            finite &= value < np.float32(np.inf)
            largest = max(largest, value)
        if not finite:  # NaN or infinity: the scale carries it to every output of the row.
            largest = np.float32(np.nan)
        scale = largest / np.float32(max_code) if largest != 0 else np.float32(1)
        scale_M[m] = scale
        for k in range(K):
            code = np.rint(x_MK[m, k] / scale) if finite else np.float32(0)
            codes_MK[m, k] = np.int16(code)
        for k in range(K, codes_MK.shape[1]):
            codes_MK[m, k] = 0


@numba.njit(parallel=True, nogil=True, cache=True, fastmath=_FAST)
def rms_norm(x_THD, gain_D, eps, out_THD):  # type: ignore[no-untyped-def]
    """Set out = x / sqrt(mean(x ** 2) + eps) * gain over the last dimension."""
    T, H, D = x_THD.shape
    for t in prange(T):
        for h in range(H):
            total = np.float32(0)
            for d in range(D):
                total += x_THD[t, h, d] * x_THD[t, h, d]
            inverse = np.float32(1) / np.sqrt(total / np.float32(D) + np.float32(eps))
            for d in range(D):
                out_THD[t, h, d] = x_THD[t, h, d] * inverse * gain_D[d]


@numba.njit(parallel=True, nogil=True, cache=True, fastmath=_FAST)
def silu_mul(gate_up_TJ, out_TI):  # type: ignore[no-untyped-def]
    """Set out = gate * sigmoid(gate) * up for rows that hold gate, then up."""
    T, I = out_TI.shape  # noqa: E741
    for t in prange(T):
        for i in range(I):
            gate = gate_up_TJ[t, i]
            out_TI[t, i] = gate / (np.float32(1) + _exp(-gate)) * gate_up_TJ[t, I + i]


@numba.njit(parallel=True, nogil=True, cache=True, fastmath=_FAST)
def rotate(x_THD, cos_TC, sin_TC, out_THD):  # type: ignore[no-untyped-def]
    """Set out = x with the pairs (i, i + D / 2) of every head rotated."""
    T, H, D = x_THD.shape
    half = D // 2
    for t in prange(T):
        for h in range(H):
            for i in range(half):
                low, high = x_THD[t, h, i], x_THD[t, h, half + i]
                out_THD[t, h, i] = low * cos_TC[t, i] - high * sin_TC[t, i]
                out_THD[t, h, half + i] = high * cos_TC[t, i] + low * sin_TC[t, i]


@numba.njit(nogil=True, cache=True)
def store(keys_RGLD, values_RGLD, k_TGD, v_TGD, rows_T, positions_T):  # type: ignore[no-untyped-def]
    """Write keys and values to the cache, rounded to bfloat16."""
    T, G, D = k_TGD.shape
    for t in range(T):
        row, position = rows_T[t], positions_T[t]
        for g in range(G):
            for d in range(D):
                keys_RGLD[row, g, position, d] = _to_bf16(k_TGD[t, g, d])
                values_RGLD[row, g, position, d] = _to_bf16(v_TGD[t, g, d])


@numba.njit(parallel=True, nogil=True, cache=True, fastmath=_FAST)
def attend(q_THD, keys_RGLD, values_RGLD, rows_T, positions_T, window, stride, out_THD):  # type: ignore[no-untyped-def]  # noqa: C901 - one pass over one row
    """Softmax attention of each query over its own row, positions max(0, p - window + 1)..p.

    Each (token, key/value head) is one piece of work; `stride`, coprime to their number, spreads
    long and short rows over the threads.
    """
    T, H, D = q_THD.shape
    G = keys_RGLD.shape[1]
    repeats = H // G
    factor = np.float32(1.0 / math.sqrt(D))
    for work in prange(T * G):
        item = work * stride % (T * G)
        t, g = item // G, item % G
        keys_LD, values_LD = keys_RGLD[rows_T[t], g], values_RGLD[rows_T[t], g]
        first, last = 0, positions_T[t]
        if window > 0:
            first = max(0, last - window + 1)
        count = last - first + 1
        weights = np.empty((repeats, count), np.float32)
        for j in range(count):
            for r in range(repeats):
                score = np.float32(0)
                for d in range(D):
                    score += q_THD[t, g * repeats + r, d] * _from_bf16(keys_LD[first + j, d])
                weights[r, j] = score * factor
        for r in range(repeats):
            largest = weights[r, 0]
            for j in range(count):
                largest = max(largest, weights[r, j])
            total = np.float32(0)
            for j in range(count):
                weight = _exp(weights[r, j] - largest)
                weights[r, j] = weight
                total += weight
            mixed_D = np.zeros(D, np.float32)
            for j in range(count):
                weight = weights[r, j]
                for d in range(D):
                    mixed_D[d] += weight * _from_bf16(values_LD[first + j, d])
            for d in range(D):
                out_THD[t, g * repeats + r, d] = mixed_D[d] / total
