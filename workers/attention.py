"""Attention for the CPU: each query over its own row of the cache, in the same order of sums always.

Queries that follow one another in a row go through its keys and values together; what becomes of one
does not depend on who they are. Both halves of attention are one tile (`workers.tiles.mix_tiles`): rows
of a bfloat16 matrix, weighted and summed. For scores these are the items of the keys, of KEYS positions
side by side, for outputs the values. float32 throughout; the cache holds bfloat16, as uint16.

Legend: T tokens, H query heads, G key/value heads, D head size, P the same padded to a multiple of
tiles.MIX_LANES, R rows of the cache, L positions, C cells of KEYS positions, Q queries taken together.
"""

import numpy as np
from numba import prange

from workers import tiles
from workers.jit import inlined, kernel, parallel_kernel
from workers.kernels import NO_SIGN, SUM, as_float, as_int, exp, norm_row, to_bf16

KEYS = tiles.MIX_LANES  # Positions of a cell of keys.
_LANES, _MOST = tiles.MIX_LANES, tiles.MIX_ROWS
_QUERIES = 24  # Taken together, about.
_mix_1, _mix_2, _mix_3, _mix_4, _mix_5, _mix_6 = tiles.mix_tiles


@kernel()
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
    q is float32 [T, H, P], keys bfloat16 [layers, R, G, C, P, KEYS], values [layers, R, G, L, P]; padding
    is set to zero.
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
                norm_row(x_D, gain_D, eps, normed_D)
            else:
                normed_D[:] = x_D
            _rotate_head(normed_D, cos_C, sin_C, rotated_D)
            if h < H:
                q_THP[t, h, :D] = rotated_D
                q_THP[t, h, D:] = 0
            else:
                cell_P = keys[layer, row, h - H, position // KEYS, :, position % KEYS]
                _store_head(rotated_D, cell_P)
        for g in range(G):
            start = (H + G + g) * D
            _store_head(qkv_TJ[t, start : start + D], values[layer, row, g, position])


@kernel()
def _store_head(x_D, out_P):  # type: ignore[no-untyped-def]
    """Round to bfloat16; the padding is set to zero."""
    for d in range(x_D.size):
        out_P[d] = to_bf16(x_D[d])
    for d in range(x_D.size, out_P.size):
        out_P[d] = 0


@inlined()
def _mix(num, a, a_stride, b, b_stride, count, fresh, out, out_stride):  # type: ignore[no-untyped-def]
    """The tile for `num` (1 to 6) rows; see `workers.tiles`."""
    if num == 6:
        _mix_6(a, a_stride, b, b_stride, count, fresh, out, out_stride)
    elif num == 5:
        _mix_5(a, a_stride, b, b_stride, count, fresh, out, out_stride)
    elif num == 4:
        _mix_4(a, a_stride, b, b_stride, count, fresh, out, out_stride)
    elif num == 3:
        _mix_3(a, a_stride, b, b_stride, count, fresh, out, out_stride)
    elif num == 2:
        _mix_2(a, a_stride, b, b_stride, count, fresh, out, out_stride)
    else:
        _mix_1(a, a_stride, b, b_stride, count, fresh, out, out_stride)


@kernel()
def _mix_all(weights_QL, first, num, column, count, b, size, fresh, out):  # type: ignore[no-untyped-def]
    """Set out = weights @ b or add that, for `num` rows of weights and `count` columns of them.

    b holds `count` rows of `size` items. The weights come as an array, not as an address: numba frees
    an array behind the last place that names it.
    """
    stride = weights_QL.shape[1]
    a = weights_QL.ctypes.data + (first * stride + column) * 4
    for d in range(0, size, _LANES):
        for r in range(0, num, _MOST):
            rows = min(_MOST, num - r)
            at = out + (r * size + d) * 4
            _mix(rows, a + r * stride * 4, stride, b + d * 2, size, count, fresh, at, size)


@inlined()
def _ordered(bits):  # type: ignore[no-untyped-def]
    """A float32's bits as an int32 in the order of the floats, and back again: a largest int is found
    many lanes at a time.
    """
    return np.int32(bits ^ ((bits >> np.int32(31)) & NO_SIGN))


@kernel(fastmath=SUM)
def _sum(x_L):  # type: ignore[no-untyped-def]
    total = np.float32(0)
    for j in range(x_L.size):
        total += x_L[j]
    return total


@kernel()
def _exponentials(scores_L, factor):  # type: ignore[no-untyped-def]
    """Turn scores into weights in place; returns their sum."""
    most = _ordered(as_int(scores_L[0]))
    for j in range(scores_L.size):
        most = max(most, _ordered(as_int(scores_L[j])))
    largest = as_float(_ordered(most))
    for j in range(scores_L.size):
        scores_L[j] = exp((scores_L[j] - largest) * factor)
    return _sum(scores_L)


@kernel()
def _attend_together(q_QP, num_heads, positions_T, window, keys_CPK, values_LP, factor, out_QP):  # type: ignore[no-untyped-def]
    """Attend `num_heads` queries of each token, the tokens in a row's order, over that row's head.

    With more than one token every window reaches back to the row's beginning.
    """
    Q, P = q_QP.shape
    num_seen, last = positions_T[0] + 1, positions_T[-1]  # By all of them; by the last one.
    first = max(0, num_seen - window) if window > 0 else 0
    start = first // KEYS
    width = (last // KEYS + 1 - start) * KEYS
    weights_QL = np.empty((Q, width), np.float32)
    weights = weights_QL.ctypes.data
    for c in range(width // KEYS):
        cell = keys_CPK[start + c].ctypes.data
        for r in range(0, Q, _MOST):
            q, at = q_QP.ctypes.data + r * P * 4, weights + (r * width + c * KEYS) * 4
            _mix(min(_MOST, Q - r), q, P, cell, KEYS, P, True, at, width)
    offset = first - start * KEYS
    sums_Q = np.empty(Q, np.float32)
    for r in range(Q):
        end = positions_T[r // num_heads] + 1 - start * KEYS
        sums_Q[r] = _exponentials(weights_QL[r, offset:end], factor)
    values, out = values_LP.ctypes.data, out_QP.ctypes.data
    _mix_all(weights_QL, 0, Q, offset, num_seen - first, values + first * P * 2, P, True, out)
    for r in range(num_heads, Q, num_heads):  # What later tokens see beyond that.
        column, beyond = num_seen - start * KEYS, values + num_seen * P * 2
        count = positions_T[r // num_heads] + 1 - num_seen
        at = out + r * P * 4
        _mix_all(weights_QL, r, num_heads, column, count, beyond, P, False, at)
    for r in range(Q):
        for p in range(P):
            out_QP[r, p] /= sums_Q[r]


@kernel()
def _pieces(rows_T, positions_T, most):  # type: ignore[no-untyped-def]
    """Where pieces of at most so many tokens start that follow one another in a row; and T."""
    T = rows_T.size
    starts = np.empty(T + 1, np.int64)
    num = 0
    for t in range(T):
        follows = t > 0 and rows_T[t] == rows_T[t - 1] and positions_T[t] == positions_T[t - 1] + 1
        if not follows or t - starts[num - 1] == most:
            starts[num] = t
            num += 1
    starts[num] = T
    return starts[: num + 1]


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
def attend(q_THP, rows_T, positions_T, layer, keys, values, window, factor, out_THP):  # type: ignore[no-untyped-def]
    """Softmax attention of each query over its own row, positions max(0, p - window + 1)..p.

    keys and values as `prepare_heads` leaves them; `factor` scales the scores.
    """
    _, H, P = q_THP.shape
    G = keys.shape[2]
    repeats = H // G
    starts = _pieces(rows_T, positions_T, max(1, _QUERIES // max(1, repeats)))
    count = (starts.size - 1) * G
    stride = _spreading_stride(count)
    for work in prange(count):
        item = work * stride % count
        piece, g = item // G, item % G
        start, end = starts[piece], starts[piece + 1]
        row = rows_T[start]
        is_cut = window > 0 and positions_T[end - 1] >= window
        step = 1 if is_cut else end - start
        q_QP = np.empty((step * repeats, P), np.float32)
        out_QP = np.empty_like(q_QP)
        for t in range(start, end, step):
            for i in range(step):
                for r in range(repeats):
                    q_QP[i * repeats + r] = q_THP[t + i, g * repeats + r]
            _attend_together(
                q_QP,
                repeats,
                positions_T[t : t + step],
                window,
                keys[layer, row, g],
                values[layer, row, g],
                factor,
                out_QP,
            )
            for i in range(step):
                for r in range(repeats):
                    out_THP[t + i, g * repeats + r] = out_QP[i * repeats + r]
