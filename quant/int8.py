"""Symmetric int8 quantization, and the order in which int8 weights are kept.

Weights carry one scale per output channel, activations one scale per token, taken at run time:

    w_q = round(w / w_scale)   w_scale = max|w| over the row   / 127
    x_q = round(x / x_scale)   x_scale = max|x| over the token / 127
    y   = (x_q @ w_q.T) * w_scale * x_scale (+ bias)

Codes are in [-127, 127]: the format is symmetric, and -128 would only disturb kernels that
compensate for a zero point. The products are summed in int32, which is exact in any order, so a
token's result has the same bits alone and in company: the property that makes speculative
verification reproduce plain decoding. An all-zero row or token gets the scale 1.

The head, and down_proj if asked, use more bits for their activations at no cost in bytes: `max_code`
bounds the codes so that no int32 sum can overflow. (SmoothQuant, arXiv 2211.10438, describes the
per-channel, per-token scheme.)

Legend: M tokens, N output channels, K input channels.
"""

import torch

from quant.config import QuantConfig

MAX_CODE = 127
MAX_WIDE_CODE = 127 * 256 + 127  # Of an activation of two signed bytes.
PACK_N, PACK_K = 16, 4  # Outputs and inputs of a packed cell.
PACK_STEP = 2 * PACK_K  # Inputs are padded to a multiple: kernels take two cells at a time.
_INT32_MAX = 2**31 - 1
_BLOCK = 16384  # Rows quantized at once.


def max_activation_code(num_inputs: int) -> int:
    """The largest code of two signed bytes whose sums with int8 weights over K inputs fit an int32."""
    # Other tools also use the code -128.
    return min(MAX_WIDE_CODE, _INT32_MAX // (128 * num_inputs))


def activation_code(config: QuantConfig, name: str, num_inputs: int) -> int:
    """The largest activation code of an int8 linear ("head", or a group's name) with K inputs."""
    is_wide = name == "head" or (name == "down" and config.down_activations == "int16")
    return max_activation_code(num_inputs) if is_wide else MAX_CODE


def quantize_rows(
    x_MK: torch.Tensor, max_code: int = MAX_CODE
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize each row with its own scale.

    Args:
        x_MK: a floating-point matrix; not changed.
        max_code: codes lie in [-max_code, max_code]; above 127 they are returned as int16.

    Returns:
        Codes [M, K] (int8 or int16) and scales [M] (float32).
    """
    if len(x_MK) > _BLOCK:  # A head has a hundred thousand rows, and five copies of it in float32.
        codes, scales = zip(
            *(quantize_rows(part, max_code) for part in x_MK.split(_BLOCK)), strict=True
        )
        return torch.cat(codes), torch.cat(scales)
    x_MK = x_MK.float()
    scale_M = _scale(x_MK.abs().amax(dim=1), max_code)
    codes_MK = (x_MK / scale_M[:, None]).round().clamp(-max_code, max_code)
    return codes_MK.to(torch.int8 if max_code <= MAX_CODE else torch.int16), scale_M


def _scale(largest: torch.Tensor, max_code: int) -> torch.Tensor:
    scale = largest / max_code
    # Of a row of zeros, and of one so small that its scale is: its codes are zeros.
    return torch.where(scale == 0, torch.ones_like(scale), scale)


def round_rows(x_MK: torch.Tensor, max_code: int = MAX_CODE) -> torch.Tensor:
    """The nearest matrix that codes with a scale per row can stand for, in the dtype of `x_MK`."""
    scale_M1 = _scale(x_MK.abs().amax(dim=1, keepdim=True), max_code)
    return (x_MK / scale_M1).round_().clamp_(-max_code, max_code).mul_(scale_M1)


def dequantize_rows(codes_MK: torch.Tensor, scale_M: torch.Tensor) -> torch.Tensor:
    """The float32 matrix that codes and row scales stand for."""
    return codes_MK.float() * scale_M[:, None]


def pack(codes_NK: torch.Tensor) -> torch.Tensor:
    """Order int8 weights for the CPU's integer instructions, which add neighbouring products.

    A cell holds PACK_K neighbouring inputs of PACK_N neighbouring outputs, so that one vector load
    serves several outputs and no sum has to cross lanes.

    Args:
        codes_NK: int8 [N, K].

    Returns:
        int8 [N / PACK_N, K / PACK_K, PACK_N, PACK_K], contiguous; N and K are rounded up to multiples of
        PACK_N and PACK_STEP, the rest is zero.
    """
    num_outputs, num_inputs = codes_NK.shape
    missing = 0, -num_inputs % PACK_STEP, 0, -num_outputs % PACK_N
    padded_NK = torch.nn.functional.pad(codes_NK, missing)
    cells: torch.Tensor = padded_NK.unflatten(1, (-1, PACK_K)).unflatten(0, (-1, PACK_N))
    return cells.transpose(1, 2).contiguous()


def unpack(packed: torch.Tensor, num_outputs: int, num_inputs: int) -> torch.Tensor:
    """The weights [N, K] that were packed."""
    padded_NK: torch.Tensor = packed.transpose(1, 2).flatten(2, 3).flatten(0, 1)
    return padded_NK[:num_outputs, :num_inputs]
