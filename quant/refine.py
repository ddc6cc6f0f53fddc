"""Smoothing scales refined by gradient descent on the error that quantization is expected to make.

Rounding errors are taken as independent and uniform over a code's width. For a group of linears
y = W x with scales s, per token t, in units of 1 / (12 * 127 ** 2):

    of the activations:  max_j (x_tj / s_j) ** 2  *  sum_j s_j ** 2 * sum_i W_ij ** 2
    of the weights:      sum_i max_j (W_ij * s_j) ** 2  *  sum_j (x_tj / s_j) ** 2

both relative to |y_t| ** 2, averaged over tokens. That is cheap (no matrix product), smooth but for the
maxima, and sees every channel at once, where SmoothQuant's rule looks at each by itself. A token tells
of no more than its largest channel, so with fewer tokens than channels the outcome would fit the tokens
and not the channels: it is held near the scales it starts from. The search in `quant.smooth` keeps it
only where the error falls that is measured on other texts.

Legend: T tokens, K inputs and J outputs of a group of linears.
"""

import itertools
import math

import torch

_STEPS = 100
_BATCH = 256  # Tokens of a step.
_RATE = 0.03
_HOLD = 3.0  # Weight of the mean squared change of log s, against the log of the error.


def refine_scales(
    x_TK: torch.Tensor, weight_JK: torch.Tensor, scale_K: torch.Tensor
) -> torch.Tensor:
    """Better scales [K] for inputs like `x_TK`, starting from `scale_K`; deterministic."""
    order = torch.randperm(len(x_TK), generator=torch.Generator().manual_seed(0))
    weight_JK = weight_JK.abs()
    column_power_K = weight_JK.square().sum(dim=0)
    log_start_K = scale_K.log()
    log_scale_K = log_start_K.clone()
    optimizer = torch.optim.Adam([log_scale_K], lr=_RATE, betas=(0.8, 0.95))
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, _STEPS)
    batches = itertools.cycle(order.chunk(math.ceil(len(order) / _BATCH)))
    for step in range(_STEPS):
        if step % 10 == 0:
            widest_J = (weight_JK * log_scale_K.exp()).argmax(dim=1)
            widest_weight_J = weight_JK.gather(1, widest_J[:, None])[:, 0]
        power_BK = x_TK[next(batches)].square()
        power_BK /= (power_BK @ column_power_K).clamp(min=1e-20)[:, None]
        gradient_K = _gradient(power_BK, column_power_K, widest_J, widest_weight_J, log_scale_K)
        moved_K = log_scale_K - log_start_K
        log_scale_K.grad = gradient_K + 2 * _HOLD * moved_K / len(moved_K)
        optimizer.step()
        schedule.step()
    return log_scale_K.exp()


def _gradient(
    power_BK: torch.Tensor,
    column_power_K: torch.Tensor,
    widest_J: torch.Tensor,
    widest_weight_J: torch.Tensor,
    log_scale_K: torch.Tensor,
) -> torch.Tensor:
    """Of the log of the sum of both terms by log s [K].

    `power_BK` holds (x / |y|) ** 2 for a batch B of tokens; `widest_J` is each output's largest column,
    taken as fixed for a few steps, and `widest_weight_J` its weight there.
    """
    factor_K = (2 * log_scale_K).exp()
    smoothed_BK = power_BK / factor_K
    # Of the activations: a token's step, and what the columns make of it.
    steps_B, largest_B = smoothed_BK.max(dim=1)
    columns_K = column_power_K * factor_K
    steps_K = torch.zeros_like(factor_K).index_add_(0, largest_B, steps_B / len(steps_B))
    # Of the weights: an output's step, and what the inputs make of it.
    ranges_J = widest_weight_J.square() * factor_K[widest_J]
    ranges_K = torch.zeros_like(factor_K).index_add_(0, widest_J, ranges_J)
    inputs_K = smoothed_BK.mean(dim=0)

    step, columns, ranges, inputs = (v.sum() for v in (steps_K, columns_K, ranges_K, inputs_K))
    slope_K = columns_K * step - columns * steps_K + ranges_K * inputs - ranges * inputs_K
    return 2 * slope_K / (step * columns + ranges * inputs).clamp(min=1e-30)
