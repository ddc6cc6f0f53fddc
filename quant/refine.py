"""Smoothing scales refined by gradient descent on the error that quantization is expected to make.

Rounding errors are taken as independent and uniform over a code's width. For a group of linears
y = W x with scales s, per token t, in units of 1 / (12 * 127 ** 2):

    of the activations:  max_j (x_tj / s_j) ** 2  *  sum_j s_j ** 2 * sum_i W_ij ** 2
    of the weights:      sum_i max_j (W_ij * s_j) ** 2  *  sum_j (x_tj / s_j) ** 2

both relative to |y_t| ** 2, averaged over tokens. That is cheap (no matrix product), smooth but for the
maxima, and sees every channel at once, where SmoothQuant's rule looks at each by itself. The search in
`quant.smooth` keeps the outcome only where the measured error falls.

Legend: T tokens, K inputs and J outputs of a group of linears.
"""

import torch

_STEPS = 100
_BATCH = 256  # Tokens of a step.
_RATE = 0.03


def refine_scales(
    x_TK: torch.Tensor, weight_JK: torch.Tensor, scale_K: torch.Tensor
) -> torch.Tensor:
    """Better scales [K] for inputs like `x_TK`, starting from `scale_K`; deterministic."""
    generator = torch.Generator().manual_seed(0)
    weight_JK = weight_JK.abs()
    column_power_K = weight_JK.square().sum(dim=0)
    with torch.enable_grad():
        log_scale_K = scale_K.log().clone().requires_grad_()
        optimizer = torch.optim.Adam([log_scale_K], lr=_RATE, betas=(0.8, 0.95))
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, _STEPS)
        for step in range(_STEPS):
            picked = torch.randint(len(x_TK), (_BATCH,), generator=generator)
            if step % 10 == 0:
                widest_J = (weight_JK * log_scale_K.detach().exp()).argmax(dim=1)
            x_BK = x_TK[picked].abs()
            power_B = (x_BK.square() @ column_power_K).clamp(min=1e-20)
            activations, weights = _expected_errors(
                x_BK, power_B, weight_JK, column_power_K, widest_J, log_scale_K.exp()
            )
            optimizer.zero_grad()
            (activations + weights).clamp(min=1e-30).log().backward()
            optimizer.step()
            schedule.step()
        return log_scale_K.detach().exp()


def _expected_errors(
    x_BK: torch.Tensor,
    power_B: torch.Tensor,
    weight_JK: torch.Tensor,
    column_power_K: torch.Tensor,
    widest_J: torch.Tensor,
    scale_K: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The two terms; `widest_J` is each output's largest column, taken as fixed for a few steps."""
    smoothed_BK = x_BK / scale_K
    steps_B = smoothed_BK.amax(dim=1).square() / power_B
    activations = steps_B.mean() * (column_power_K * scale_K.square()).sum()
    widest = weight_JK.gather(1, widest_J[:, None])[:, 0] * scale_K[widest_J]
    weights = widest.square().sum() * (smoothed_BK.square().sum(dim=1) / power_B).mean()
    return activations, weights
