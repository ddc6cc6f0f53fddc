"""Row kernels for the CPU: norms, activations, rotary embeddings, quantization and attention.

Every kernel walks its rows one by one with the same instructions, so that no result depends on the
other rows of the pass (vectorized library calls treat the tail of an array differently from its
body). float32 throughout; the cache holds bfloat16, as uint16.
"""

import numba
import numpy as np
from llvmlite import ir
from numba import prange, types
from numba.extending import intrinsic

from workers import tiles

_TILE_K = tiles.TILE_K
_score_1, _score_2, _score_3, _score_4 = tiles.score_tiles
_mix_1, _mix_2, _mix_3, _mix_4 = tiles.mix_tiles

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
    limit = np.float32(max_code)
    for m in prange(M):
        largest = np.float32(0)
        finite = True
        for k in range(K):
            value = abs(x_MK[m, k])
            finite &= value < np.float32(np.inf)
            largest = max(largest, value)
        if not finite:  # NaN or infinity: the scale carries it to every output of the row.
            largest = np.float32(np.nan)
        scale = largest / limit if largest != 0 else np.float32(1)
        scale_M[m] = scale
        for k in range(K):
            code = np.rint(x_MK[m, k] / scale) if finite else np.float32(0)
            codes_MK[m, k] = np.int16(min(max(code, -limit), limit))
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
    """Write keys and values to the cache, rounded to bfloat16; padded heads get zeros."""
    T, G, D = k_TGD.shape
    for t in range(T):
        row, position = rows_T[t], positions_T[t]
        for g in range(G):
            for d in range(D):
                keys_RGLD[row, g, position, d] = _to_bf16(k_TGD[t, g, d])
                values_RGLD[row, g, position, d] = _to_bf16(v_TGD[t, g, d])
            for d in range(D, keys_RGLD.shape[3]):
                keys_RGLD[row, g, position, d] = 0
                values_RGLD[row, g, position, d] = 0


@numba.njit(inline="always")
def _score(num, q, keys, size_d, out):  # type: ignore[no-untyped-def]
    """Dot products of `num` (1 to 4) query rows with two keys."""
    if num == 1:
        _score_1(q, keys, size_d, out)
    elif num == 2:
        _score_2(q, keys, size_d, out)
    elif num == 3:
        _score_3(q, keys, size_d, out)
    else:
        _score_4(q, keys, size_d, out)


@numba.njit(inline="always")
def _mix(num, weights, stride, values, size_d, count, out):  # type: ignore[no-untyped-def]
    """Weighted sums of `count` values for `num` (1 to 4) weight rows."""
    if num == 1:
        _mix_1(weights, stride, values, size_d, count, out)
    elif num == 2:
        _mix_2(weights, stride, values, size_d, count, out)
    elif num == 3:
        _mix_3(weights, stride, values, size_d, count, out)
    else:
        _mix_4(weights, stride, values, size_d, count, out)


@numba.njit(nogil=True, cache=True, fastmath=_FAST)
def _softmax(weights_RL, count, factor):  # type: ignore[no-untyped-def]
    """Turn scores into weights that sum to 1, row by row, in place."""
    for r in range(weights_RL.shape[0]):
        largest = weights_RL[r, 0]
        for j in range(count):
            largest = max(largest, weights_RL[r, j])
        total = np.float32(0)
        for j in range(count):
            weight = _exp((weights_RL[r, j] - largest) * factor)
            weights_RL[r, j] = weight
            total += weight
        for j in range(count):
            weights_RL[r, j] /= total


@numba.njit(parallel=True, nogil=True, cache=True)
def attend(q_THD, keys_RGLD, values_RGLD, rows_T, positions_T, window, factor, stride, out_THD):  # type: ignore[no-untyped-def]
    """Softmax attention of each query over its own row, positions max(0, p - window + 1)..p.

    D must be a multiple of tiles.TILE_K; `factor` scales the scores. Each (token, key/value head) is
    one piece of work; `stride`, coprime to their number, spreads long and short rows over the threads.
    """
    T, H, D = q_THD.shape
    G, L = keys_RGLD.shape[1], keys_RGLD.shape[2]
    repeats = H // G
    for work in prange(T * G):
        item = work * stride % (T * G)
        t, g = item // G, item % G
        first, last = 0, positions_T[t]
        if window > 0:
            first = max(0, last - window + 1)
        count = last - first + 1
        offset = (((rows_T[t] * G + g) * L) + first) * D * 2
        keys, values = keys_RGLD.ctypes.data + offset, values_RGLD.ctypes.data + offset
        head = (t * H + g * repeats) * D * 4
        weights_RL = np.empty((repeats, count), np.float32)
        pair = np.empty((4, 2), np.float32)
        weights_RL[:, 0] = (
            0  # A lone key's weight is 1 whatever it scores, and it has no neighbour.
        )
        for r0 in range(0, repeats if count > 1 else 0, 4):
            num = min(4, repeats - r0)
            query = q_THD.ctypes.data + head + r0 * D * 4
            for j0 in range(0, count, 2):
                j = min(j0, count - 2)  # Where their number is odd, one key is scored twice.
                _score(num, query, keys + j * D * 2, D, pair.ctypes.data)
                for i in range(num):
                    weights_RL[r0 + i, j] = pair[i, 0]
                    weights_RL[r0 + i, j + 1] = pair[i, 1]
        _softmax(weights_RL, count, factor)
        for r0 in range(0, repeats, 4):
            num = min(4, repeats - r0)
            weights = weights_RL.ctypes.data + r0 * count * 4
            for d in range(0, D, _TILE_K):
                out = out_THD.ctypes.data + head + (r0 * D + d) * 4
                _mix(num, weights, count, values + d * 2, D, count, out)
