"""Matrix products for the CPU: the register tiles driven by numba over all tokens and outputs.

Legend: M tokens, N outputs, K inputs.
"""

import numpy as np
from numba import prange

from quant.int8 import MAX_CODE, PACK_K, PACK_N, PACK_STEP
from workers import kernels, tiles, vnni
from workers.jit import inlined, kernel, parallel_kernel

_TILE_M, _TILE_N = tiles.TILE_M, tiles.TILE_N
_BLOCK_M, _BLOCK_N = 64, 64
_int8_1, _int8_2, _int8_3, _int8_4 = tiles.int8_tiles
_vnni_1, _vnni_2, _vnni_3, _vnni_4, _vnni_5, _vnni_6, _vnni_7, _vnni_8 = vnni.vnni_tiles
_VNNI_M, _VNNI_N, _OFFSET = vnni.TILE_M, vnni.TILE_N, np.int32(vnni.OFFSET)
_float_1, _float_4 = tiles.float_tiles[0], tiles.float_tiles[3]
_HALF = tiles.int8_outputs(_TILE_M)
assert tiles.int8_outputs(2) == PACK_N
assert 2 * _HALF == PACK_N


@inlined()
def _int8_sums(rows, x, w, size_k, ahead, shift, sums):  # type: ignore[no-untyped-def]
    """Sums of `rows` (1 to 4) tokens with PACK_N outputs of a block, or the half of them from w on."""
    if rows == 1:
        _int8_1(x, w, size_k, ahead, shift, sums)
    elif rows == 2:
        _int8_2(x, w, size_k, ahead, shift, sums)
    elif rows == 3:
        _int8_3(x, w, size_k, ahead, shift, sums)
    else:
        _int8_4(x, w, size_k, ahead, shift, sums)


@inlined()
def _floor_log2(count):  # type: ignore[no-untyped-def]
    exponent = 0
    while 2 << exponent <= count:
        exponent += 1
    return exponent


@parallel_kernel()
def matmul_int8(x_MK, x_scale_M, w, w_scale_N, bias_N, add, out_MN):  # type: ignore[no-untyped-def]
    """Set out = (x @ w.T) * w_scale * x_scale + bias, the sums exact in int32; or add that to out.

    int16 codes [M, K] with float32 scales [M]; the address of packed int8 weights; float32 scales and
    biases [N rounded up to PACK_N]; float32 out [M, N]. K must be a multiple of PACK_STEP.
    """
    M, K = x_MK.shape
    N = out_MN.shape[1]
    # The next block comes from memory while this one is worked on, an even part with each tile.
    shift = _floor_log2(1 if M <= 2 else (M + _TILE_M - 1) // _TILE_M * 2)
    num_parts = 1 << shift
    for block in prange(w_scale_N.size // PACK_N):
        sums = np.empty((_TILE_M, PACK_N), np.int32)
        n0 = block * PACK_N
        num_n = min(PACK_N, N - n0)
        here, size, tile = w + n0 * K, PACK_N * K, 0
        scale, bias = w_scale_N[n0 : n0 + PACK_N], bias_N[n0 : n0 + PACK_N]
        for m0 in range(0, M, _TILE_M):
            rows = min(_TILE_M, M - m0)
            x = x_MK.ctypes.data + m0 * K * 2
            step = PACK_N if rows <= 2 else _HALF
            for half in range(0, PACK_N, step):
                ahead = here + size + tile % num_parts * (size // num_parts)
                at = sums.ctypes.data + half * 4
                _int8_sums(rows, x, here + half * PACK_K, K, ahead, shift, at)
                tile += 1
            for i in range(rows):
                out = out_MN[m0 + i, n0 : n0 + num_n]
                x_scale = x_scale_M[m0 + i]
                for j in range(num_n):
                    y = np.float32(sums[i, j]) * scale[j] * x_scale + bias[j]
                    out[j] = out[j] + y if add else y


@inlined()
def _vnni_sums(rows, x, w, w_next, size_k, ahead, shift, sums):  # type: ignore[no-untyped-def]
    """Sums of `rows` (1 to 8) tokens with the outputs of two blocks, whose weights have the offset."""
    if rows == 8:
        _vnni_8(x, w, w_next, size_k, ahead, shift, sums)
    elif rows == 7:
        _vnni_7(x, w, w_next, size_k, ahead, shift, sums)
    elif rows == 6:
        _vnni_6(x, w, w_next, size_k, ahead, shift, sums)
    elif rows == 5:
        _vnni_5(x, w, w_next, size_k, ahead, shift, sums)
    elif rows == 4:
        _vnni_4(x, w, w_next, size_k, ahead, shift, sums)
    elif rows == 3:
        _vnni_3(x, w, w_next, size_k, ahead, shift, sums)
    elif rows == 2:
        _vnni_2(x, w, w_next, size_k, ahead, shift, sums)
    else:
        _vnni_1(x, w, w_next, size_k, ahead, shift, sums)


@parallel_kernel()
def matmul_vnni(x_MBK, x_scale_M, w, w_scale_N, bias_N, add, out_MN):  # type: ignore[no-untyped-def]
    """As `matmul_int8`, for codes of B signed bytes (1 or 2, the lowest first), by `workers.vnni`."""
    M, B, K = x_MBK.shape
    N = out_MN.shape[1]
    excess_M = np.empty(M, np.int32)
    for m in range(M):
        total = np.int32(0)
        for b in range(B):
            for k in range(K):
                total += np.int32(x_MBK[m, b, k]) << (8 * b)
        excess_M[m] = total * _OFFSET
    tokens = _VNNI_M // B  # Of a tile: a byte takes a row.
    shift = _floor_log2((M + tokens - 1) // tokens)
    num_parts = 1 << shift
    for pair in prange((N + _VNNI_N - 1) // _VNNI_N):
        sums = np.empty((_VNNI_M, _VNNI_N), np.int32)
        n0 = pair * _VNNI_N
        num_n = min(_VNNI_N, N - n0)
        here, size = w + n0 * K, _VNNI_N * K
        w_next = here + PACK_N * K if num_n > PACK_N else here  # The last block may stand alone.
        scale, bias = w_scale_N[n0 : n0 + num_n], bias_N[n0 : n0 + num_n]
        for m0 in range(0, M, tokens):
            num_m = min(tokens, M - m0)
            ahead = here + size + m0 // tokens % num_parts * (size // num_parts)
            x = x_MBK.ctypes.data + m0 * B * K
            _vnni_sums(num_m * B, x, here, w_next, K, ahead, shift, sums.ctypes.data)
            for i in range(num_m):
                out = out_MN[m0 + i, n0 : n0 + num_n]
                x_scale, excess = x_scale_M[m0 + i], excess_M[m0 + i]
                if B == 2:
                    for j in range(num_n):
                        sums[i, j] = sums[2 * i, j] + (sums[2 * i + 1, j] << 8)
                for j in range(num_n):
                    total = np.int32(sums[i, j] - excess)  # Modulo 2 ** 32, like all sums before.
                    y = np.float32(total) * scale[j] * x_scale + bias[j]
                    out[j] = out[j] + y if add else y


@parallel_kernel()
def matmul_bf16(x_MK, w_NK, bias_N, add, out_MN):  # type: ignore[no-untyped-def]
    """Set out = x @ w.T + bias for float32 x [M, K] and bfloat16 (as uint16) w [N, K]; or add that.

    float32 bias [N]; float32 out [M, N]. K must be a multiple of tiles.TILE_K, N at least 2.
    """
    M, K = x_MK.shape
    N = w_NK.shape[0]
    x, w = x_MK.ctypes.data, w_NK.ctypes.data
    for block in prange((N + _BLOCK_N - 1) // _BLOCK_N):
        sums = np.empty(_TILE_M * _TILE_N, np.float32)
        for m_block in range(0, M, _BLOCK_M):
            m_end = min(M, m_block + _BLOCK_M)
            for n_at in range(block * _BLOCK_N, min(N, (block + 1) * _BLOCK_N), _TILE_N):
                n0 = min(n_at, N - _TILE_N)  # Of an odd number the last but one is summed again.
                m0 = m_block
                while m0 < m_end:
                    if m_end - m0 >= _TILE_M:
                        rows = _TILE_M
                        _float_4(x + m0 * K * 4, w + n0 * K * 2, K, sums.ctypes.data)
                    else:
                        rows = 1
                        _float_1(x + m0 * K * 4, w + n0 * K * 2, K, sums.ctypes.data)
                    for i in range(rows):
                        for j in range(n_at - n0, _TILE_N):
                            m, n = m0 + i, n0 + j
                            y = sums[i * _TILE_N + j] + bias_N[n]
                            out_MN[m, n] = out_MN[m, n] + y if add else y
                    m0 += rows


@inlined()
def _quantize(x_MJ, gated, max_code, codes_MK, scale_M):  # type: ignore[no-untyped-def]
    if gated:
        kernels.quantize_gated_rows(x_MJ, max_code, codes_MK, scale_M)
    else:
        kernels.quantize_rows(x_MJ, max_code, codes_MK, scale_M)


@inlined()
def _padded_inputs(num_columns, gated):  # type: ignore[no-untyped-def]
    size = num_columns // 2 if gated else num_columns
    return (size + PACK_STEP - 1) // PACK_STEP * PACK_STEP


@kernel()
def linear_int8(x_MJ, gated, max_code, w, w_scale_N, bias_N, add, out_MN):  # type: ignore[no-untyped-def]
    """Quantize float32 x [M, K] row by row, then as `matmul_int8`.

    If `gated`, x holds gate and up [M, 2 K], and what is quantized is silu(gate) * up.
    """
    M = x_MJ.shape[0]
    codes_MK = np.empty((M, _padded_inputs(x_MJ.shape[1], gated)), np.int16)
    scale_M = np.empty(M, np.float32)
    _quantize(x_MJ, gated, max_code, codes_MK, scale_M)
    matmul_int8(codes_MK, scale_M, w, w_scale_N, bias_N, add, out_MN)


@kernel()
def linear_vnni(x_MJ, gated, max_code, w, w_scale_N, bias_N, add, out_MN):  # type: ignore[no-untyped-def]
    """As `linear_int8`, by `matmul_vnni`."""
    M, padded = x_MJ.shape[0], _padded_inputs(x_MJ.shape[1], gated)
    scale_M = np.empty(M, np.float32)
    num_bytes = 1 if max_code <= MAX_CODE else 2
    codes_MBK = np.empty((M, num_bytes, padded), np.int8)
    if num_bytes == 1:
        _quantize(x_MJ, gated, max_code, codes_MBK.reshape(M, padded), scale_M)
    else:
        codes_MK = np.empty((M, padded), np.int16)
        _quantize(x_MJ, gated, max_code, codes_MK, scale_M)
        for m in range(M):
            for k in range(padded):
                high = (codes_MK[m, k] + 128) >> 8
                codes_MBK[m, 0, k] = codes_MK[m, k] - (high << 8)
                codes_MBK[m, 1, k] = high
    matmul_vnni(codes_MBK, scale_M, w, w_scale_N, bias_N, add, out_MN)


@kernel()
def linear_bf16(x_MK, w_NK, bias_N, add, out_MN):  # type: ignore[no-untyped-def]
    """Round float32 x [M, K] to bfloat16, then as `matmul_bf16`."""
    rounded_MK = np.empty((x_MK.shape[0], w_NK.shape[1]), np.float32)
    kernels.round_rows(x_MK, rounded_MK)
    matmul_bf16(rounded_MK, w_NK, bias_N, add, out_MN)
