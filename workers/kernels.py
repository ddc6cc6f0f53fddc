"""Row kernels for the CPU: norms, activations, rotary embeddings, quantization and attention.

Every kernel walks its rows one by one with the same instructions, so that no result depends on the
other rows of the pass (vectorized library calls treat the tail of an array differently from its
body). float32 throughout; the cache holds bfloat16, as uint16.
"""

import numpy as np
from llvmlite import ir
from numba import prange, types
from numba.extending import intrinsic

from workers import tiles
from workers.jit import inlined, kernel, parallel_kernel

_TILE_K = tiles.TILE_K
_score_1, _score_2, _score_3, _score_4 = tiles.float_tiles
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


@inlined()
def _from_bf16(bits):  # type: ignore[no-untyped-def]
    return _as_float(np.int32(np.int32(bits) << np.int32(16)))


@inlined()
def _to_bf16(value):  # type: ignore[no-untyped-def]
    """Round to nearest, ties to even."""
    bits = _as_int(value)
    return np.uint16((bits + np.int32(0x7FFF) + ((bits >> 16) & 1)) >> 16)


@inlined(fastmath=_FAST)
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


@parallel_kernel()
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
        scale = largest / limit
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
            out_MK[m, k] = _from_bf16(_to_bf16(x_MK[m, k]))
        for k in range(K, out_MK.shape[1]):
            out_MK[m, k] = 0


@kernel(fastmath=_FAST)
def _norm_row(x_K, gain_K, eps, out_K):  # type: ignore[no-untyped-def]
    K = x_K.size
    total = np.float32(0)
    for k in range(K):
        total += x_K[k] * x_K[k]
    inverse = np.float32(1) / np.sqrt(total / np.float32(K) + np.float32(eps))
    for k in range(K):
        out_K[k] = x_K[k] * inverse * gain_K[k]


@parallel_kernel()
def rms_norm(x_MK, gain_K, eps, out_MK):  # type: ignore[no-untyped-def]
    """Set out = x / sqrt(mean(x ** 2) + eps) * gain, row by row."""
    for m in prange(x_MK.shape[0]):
        _norm_row(x_MK[m], gain_K, eps, out_MK[m])


@parallel_kernel(fastmath=_FAST)
def silu_mul(gate_up_MJ, out_MI):  # type: ignore[no-untyped-def]
    """Set out = gate * sigmoid(gate) * up for rows that hold gate, then up."""
    M, I = out_MI.shape  # noqa: E741
    for m in prange(M):
        for i in range(I):
            gate = gate_up_MJ[m, i]
            out_MI[m, i] = gate / (np.float32(1) + _exp(-gate)) * gate_up_MJ[m, I + i]


@kernel(fastmath=_FAST)
def _rotate_head(x_D, cos_C, sin_C, out_D):  # type: ignore[no-untyped-def]
    """Set out = x with the pairs (i, i + D / 2) rotated."""
    half = cos_C.size
    for i in range(half):
        low, high = x_D[i], x_D[half + i]
        out_D[i] = low * cos_C[i] - high * sin_C[i]
        out_D[half + i] = high * cos_C[i] + low * sin_C[i]


@parallel_kernel()
def prepare_heads(  # type: ignore[no-untyped-def]
    qkv_TJ, q_gain_D, k_gain_D, eps, cos_LC, sin_LC, rows_T, positions_T, layer, keys, values, q_THP
):
    """Norm (where there are gains) and rotate the heads; queries go to q, the rest to the cache.

    qkv rows hold H query, G key and G value heads of D items each, D twice the width of cos and sin.
    The heads of q (float32) and of keys and values (bfloat16 [layers, R, G, L, P]) may be wider: the
    padding is set to zero.
    """
    T, H, _ = q_THP.shape
    G = keys.shape[2]
    D = 2 * cos_LC.shape[1]
    for t in prange(T):
        row, position = rows_T[t], positions_T[t]
        cos_C, sin_C = cos_LC[position], sin_LC[position]
        normed_D, rotated_D = np.empty(D, np.float32), np.empty(D, np.float32)
        for h in range(H + G):
            x_D = qkv_TJ[t, h * D : (h + 1) * D]
            gain_D = q_gain_D if h < H else k_gain_D
            if gain_D.size > 0:
                _norm_row(x_D, gain_D, eps, normed_D)
            else:
                normed_D[:] = x_D
            _rotate_head(normed_D, cos_C, sin_C, rotated_D)
            if h < H:
                q_THP[t, h, :D] = rotated_D
                q_THP[t, h, D:] = 0
            else:
                _store_head(rotated_D, keys[layer, row, h - H, position])
        for g in range(G):
            start = (H + G + g) * D
            _store_head(qkv_TJ[t, start : start + D], values[layer, row, g, position])


@kernel()
def _store_head(x_D, out_P):  # type: ignore[no-untyped-def]
    """Round to bfloat16; the padding is set to zero."""
    for d in range(x_D.size):
        out_P[d] = _to_bf16(x_D[d])
    for d in range(x_D.size, out_P.size):
        out_P[d] = 0


@inlined()
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


@inlined()
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


@kernel(fastmath=_FAST)
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


@kernel()
def _spreading_stride(count):  # type: ignore[no-untyped-def]
    """A step near the golden section of `count`, coprime to it: it visits every item once, and spreads
    long and short rows over the threads.
    """
    stride = max(1, int(count * 0.618))
    while np.gcd(stride, count) > 1:
        stride += 1
    return stride


@parallel_kernel()
def attend(q_THD, rows_T, positions_T, layer, keys, values, window, factor, out_THD):  # type: ignore[no-untyped-def]
    """Softmax attention of each query over its own row, positions max(0, p - window + 1)..p.

    keys and values are bfloat16 [layers, R, G, L, D], D a multiple of tiles.TILE_K; `factor` scales
    the scores. Each (token, key/value head) is one piece of work.
    """
    T, H, D = q_THD.shape
    _, R, G, L, _ = keys.shape
    repeats = H // G
    stride = _spreading_stride(T * G)
    for work in prange(T * G):
        item = work * stride % (T * G)
        t, g = item // G, item % G
        first, last = 0, positions_T[t]
        if window > 0:
            first = max(0, last - window + 1)
        count = last - first + 1
        offset = ((((layer * R + rows_T[t]) * G + g) * L) + first) * D * 2
        k, v = keys.ctypes.data + offset, values.ctypes.data + offset
        head = (t * H + g * repeats) * D * 4
        weights_RL = np.empty((repeats, count), np.float32)
        pair = np.empty((4, 2), np.float32)
        # A lone key's weight is 1 whatever it scores, and it has no neighbour.
        weights_RL[:, 0] = 0
        for r0 in range(0, repeats if count > 1 else 0, 4):
            num = min(4, repeats - r0)
            query = q_THD.ctypes.data + head + r0 * D * 4
            for j0 in range(0, count, 2):
                j = min(j0, count - 2)  # Where their number is odd, one key is scored twice.
                _score(num, query, k + j * D * 2, D, pair.ctypes.data)
                for i in range(num):
                    weights_RL[r0 + i, j] = pair[i, 0]
                    weights_RL[r0 + i, j + 1] = pair[i, 1]
        _softmax(weights_RL, count, factor)
        for r0 in range(0, repeats, 4):
            num = min(4, repeats - r0)
            weights = weights_RL.ctypes.data + r0 * count * 4
            for d in range(0, D, _TILE_K):
                out = out_THD.ctypes.data + head + (r0 * D + d) * 4
                _mix(num, weights, count, v + d * 2, D, count, out)
