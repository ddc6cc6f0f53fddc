"""SmoothQuant: outliers are moved from a linear's inputs, which share a scale per token, to its weights.

Input channel j of a group of linears is divided by s_j and column j of their weights is multiplied by
it, which changes nothing but what int8 codes can hold. The division is folded into what comes before:
the norm's gain, v_proj's rows (in grouped-query attention a channel of a value head serves several query
heads, so they share its s_j), up_proj's rows. SmoothQuant (arXiv 2211.10438) takes

    s_j = max|x_j| ** alpha / max|w_j| ** (1 - alpha)

The recipe "m2", after the enhancement that Quasar (arXiv 2603.01399) uses, which in turn goes back to
Outlier Suppression+ (arXiv 2304.09145), lowers only outlier channels and searches the threshold that
makes a channel one: s_j = max(1, b_j / t), b_j being SmoothQuant's value. Here alpha and t are both
searched, the outcome is refined by gradient descent (`quant.refine`), and b_j is made of norms instead
of maxima, since the maximum of a channel that rarely fires is whatever the texts happen to hold:

    b_j = |x_j|_q ** alpha / |w_j|_2 ** (1 - alpha),  alpha = q / (q + 2)

Of all scales with the same sum_j s_j ** 2 * |w_j| ** 2, by which a token's rounding step is multiplied
on its way to the output, these have the smallest sum_j E|x_j / s_j| ** q, which stands for the token's
largest input (set the derivative to zero). x is taken relative to the token's output.

Scales are fitted to some texts and chosen by others. What is kept is what has the smallest error of what
the group feeds: the attention's output for q/k/v, silu(gate) * up for gate/up, else the linear's own
output; per token and relative, so that the few tokens with massive activations do not decide alone.

Legend: T tokens, C model width, K inputs and J outputs of a group, H, G, D as in `quant.decoder`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from quant.architecture import Architecture
from quant.checkpoint import LinearGroup, linear_groups
from quant.config import Recipe
from quant.decoder import LayerTensors, attend, fused_bias, fused_weight, gated
from quant.int8 import round_rows
from quant.refine import refine_scales

Scales = dict[str, torch.Tensor]  # By a group's name: s [K], float32.

_ALPHA_STEP = 0.1
_ALPHAS = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
_THRESHOLDS = (0.25, 0.5, 0.75, 0.9)  # Shares of the channels that stay as they are.
_SOURCES = {
    "qkv": "input_layernorm",
    "gate_up": "post_attention_layernorm",
    "o": "self_attn.v_proj",
    "down": "mlp.up_proj",
}
_SMALLEST = 1e-5
_POWERS = (1.0, 128.0)  # The smallest and the largest q; the latter stands for the maximum.
_MAX_OUTPUTS = 1024  # Outputs of a group that the search looks at.
_CHUNK = 1024  # Tokens whose powers are in memory at once.


def smooth_(layer: LayerTensors, architecture: Architecture, scales: Scales) -> None:
    """Fold the scales into a layer's tensors, in place; the layer computes what it did before."""
    for group in linear_groups(architecture):
        if group.name not in scales:
            continue
        scale_K = scales[group.name].to(layer["input_layernorm.weight"].dtype)
        for linear in group.linears:
            layer[f"{linear}.weight"] = layer[f"{linear}.weight"] * scale_K
        if group.name == "o":  # One scale per channel of a key/value head: see `_tie`.
            a = architecture
            scale_K = scale_K.view(a.num_kv_heads, -1, a.head_dim)[:, 0].flatten()
        source = _SOURCES[group.name]
        weight = layer[f"{source}.weight"]
        layer[f"{source}.weight"] = weight / (scale_K if weight.dim() == 1 else scale_K[:, None])
        if f"{source}.bias" in layer:
            layer[f"{source}.bias"] = layer[f"{source}.bias"] / scale_K


@dataclass(frozen=True)
class LayerSample:
    """What the search knows of a layer: its tensors, and its linears' inputs, by group.

    `absmax` holds max|x_j| [K] over all calibration texts, `fitted` the x [T, K] that scales are fitted
    to, and `checked` those of the texts, of `lengths` tokens, that errors are measured on; activation
    codes are at most `max_codes`.
    """

    layer: LayerTensors
    architecture: Architecture
    index: int
    absmax: dict[str, torch.Tensor]
    fitted: dict[str, torch.Tensor]
    checked: dict[str, torch.Tensor]
    lengths: Sequence[int]
    max_codes: Mapping[str, int]


def search_scales(
    sample: LayerSample, recipe: Recipe, alpha: float | None, dtype: torch.dtype
) -> tuple[Scales, dict[str, float]]:
    """Choose a layer's scales.

    Args:
        sample: the layer.
        recipe: "rtn" (no scales), "smoothquant" or "m2".
        alpha: SmoothQuant's; None: searched.
        dtype: in which norm gains are stored; the scales are such that a smoothed gain is exact in it.

    Returns:
        The scales, and for every group the mean over tokens of |error|^2 / |output|^2 with them.
    """
    scales: Scales = {}
    errors: dict[str, float] = {}
    for group in linear_groups(sample.architecture):
        search = _Search(_measure(sample, group), torch.ones(sample.checked[group.name].shape[1]))
        if recipe != "rtn":
            balance = (_balance_norms if recipe == "m2" else _balance_maxima)(sample, group)
            exponent = _search_alpha(search, balance) if alpha is None else alpha
            balance_K = balance(exponent)
            if alpha is not None:
                search = _Search(search.measure, balance_K)
            if recipe == "m2":
                for share in _THRESHOLDS:
                    search.offer((balance_K / balance_K.quantile(share)).clamp(min=1))
                search.offer(_refine(sample, group, search.best_K))
            scales[group.name] = _settle(sample, group, search.best_K, dtype)
            search.error = search.measure(scales[group.name])
        errors[group.name] = search.error
    return scales, errors


class _Search:
    """The scales with the smallest error so far."""

    def __init__(self, measure: Callable[[torch.Tensor], float], scale_K: torch.Tensor) -> None:
        self.measure, self.best_K, self.error = measure, scale_K, measure(scale_K)

    def offer(self, scale_K: torch.Tensor) -> bool:
        """Take the scales if they are better; returns whether they are."""
        error = self.measure(scale_K)
        if not error < self.error:  # Not a number is no improvement either.
            return False
        self.best_K, self.error = scale_K, error
        return True


def _search_alpha(search: _Search, balance: Callable[[float], torch.Tensor]) -> float:
    """The best exponent: first of coarse steps, then half a step beside the best of them."""
    best = _ALPHAS[0]
    for exponent in _ALPHAS:
        if search.offer(balance(exponent)):
            best = exponent
    for exponent in (best - _ALPHA_STEP / 2, best + _ALPHA_STEP / 2):
        if search.offer(balance(exponent)):
            best = exponent
    return best


def _refine(sample: LayerSample, group: LinearGroup, scale_K: torch.Tensor) -> torch.Tensor:
    weight_JK = fused_weight(sample.layer, group)
    refined_K = refine_scales(sample.fitted[group.name], weight_JK, scale_K)
    return _tie(refined_K, sample.architecture, group)


Balance = Callable[[float], torch.Tensor]  # From alpha to s [K].


def _balance_maxima(sample: LayerSample, group: LinearGroup) -> Balance:
    """SmoothQuant's rule."""
    absmax_K = _tie(sample.absmax[group.name], sample.architecture, group)
    weight_max_K = fused_weight(sample.layer, group).abs().amax(dim=0)
    weight_max_K = _tie(weight_max_K, sample.architecture, group)
    return lambda alpha: _balance(absmax_K, weight_max_K, alpha)


def _balance_norms(sample: LayerSample, group: LinearGroup) -> Balance:
    """m2's rule."""
    weight_power_K = fused_weight(sample.layer, group).square().sum(dim=0)
    weight_norm_K = _tie(weight_power_K, sample.architecture, group, torch.sum).sqrt()
    logs = []
    for x_BK in sample.fitted[group.name].split(_CHUNK):
        size_B = (x_BK.square() @ weight_power_K).clamp(min=1e-20).sqrt()
        logs.append((x_BK.abs() / size_B[:, None]).log_())
    log_max_K = torch.stack([log_BK.amax(dim=0) for log_BK in logs]).amax(dim=0)
    log_max_K = _tie(log_max_K, sample.architecture, group)
    log_max_K[log_max_K.isneginf()] = 0  # Of channels that are always zero; any number does.

    def balance(alpha: float) -> torch.Tensor:
        q = min(max(2 * alpha / max(1 - alpha, 1e-9), _POWERS[0]), _POWERS[1])
        sum_K = torch.zeros_like(log_max_K)
        for log_BK in logs:
            sum_K += ((log_BK - log_max_K) * q).exp_().sum(dim=0)
        sum_K = _tie(sum_K, sample.architecture, group, torch.sum)
        norm_K = log_max_K.exp() * sum_K ** (1 / q)
        return _balance(norm_K, weight_norm_K, alpha)

    return balance


def _balance(input_K: torch.Tensor, weight_K: torch.Tensor, alpha: float) -> torch.Tensor:
    """Input ** alpha / weight ** (1 - alpha), of geometric mean 1; 1 for dead channels."""
    alive = (input_K > 0) & (weight_K > 0)
    balance_K = torch.where(alive, input_K**alpha / weight_K ** (1 - alpha), 1)
    balance_K = balance_K / balance_K[alive].log().mean().exp()
    return torch.where(alive, balance_K.clamp(_SMALLEST, 1 / _SMALLEST), 1)


def _tie(
    values_K: torch.Tensor,
    architecture: Architecture,
    group: LinearGroup,
    merge: Callable[..., torch.Tensor] = torch.amax,
) -> torch.Tensor:
    """For o_proj's inputs: the values of the query heads that read the same value head, merged."""
    if group.name != "o":
        return values_K
    heads = values_K.view(architecture.num_kv_heads, -1, architecture.head_dim)
    return merge(heads, dim=1, keepdim=True).expand_as(heads).flatten()


def _settle(
    sample: LayerSample, group: LinearGroup, scale_K: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """The nearest scales for which a smoothed norm gain is exact in the dtype it is stored in."""
    if group.name not in ("qkv", "gate_up"):
        return scale_K
    gain_K = sample.layer[f"{_SOURCES[group.name]}.weight"]
    smoothed_K = (gain_K / scale_K).to(dtype).to(gain_K.dtype)
    usable = (smoothed_K != 0) & smoothed_K.isfinite()
    settled_K = torch.where(usable, gain_K / smoothed_K, torch.ones_like(scale_K))
    return torch.where(gain_K == 0, scale_K, settled_K)  # Of nothing, nothing is to be divided.


def _measure(sample: LayerSample, group: LinearGroup) -> Callable[[torch.Tensor], float]:
    """The function from scales to the error of what the group feeds."""
    x_TK = sample.checked[group.name]
    max_code = sample.max_codes[group.name]
    weight_JK, bias_J = fused_weight(sample.layer, group), fused_bias(sample.layer, group)
    finish: Callable[[torch.Tensor], torch.Tensor] = _identity
    if group.name == "qkv":
        finish = _attention(sample)
    else:
        keep = _spread(len(weight_JK) // len(group.linears))
        if group.name == "gate_up":
            keep = torch.cat([keep, keep + len(weight_JK) // 2])
            finish = gated
        weight_JK = weight_JK[keep]
        bias_J = None if bias_J is None else bias_J[keep]
    wanted_TJ = finish(F.linear(x_TK, weight_JK, bias_J))
    power_T = wanted_TJ.square().sum(dim=1).clamp(min=1e-20)

    def measure(scale_K: torch.Tensor) -> float:
        rounded_TK = round_rows(x_TK / scale_K, max_code)
        got_TJ = finish(F.linear(rounded_TK, round_rows(weight_JK * scale_K), bias_J))
        return float(((got_TJ - wanted_TJ).square().sum(dim=1) / power_T).mean())

    return measure


def _attention(sample: LayerSample) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda qkv_TJ: attend(
        sample.layer, sample.architecture, sample.index, qkv_TJ, sample.lengths
    )


def _identity(y_TJ: torch.Tensor) -> torch.Tensor:
    return y_TJ


def _spread(count: int) -> torch.Tensor:
    """At most _MAX_OUTPUTS of `count` indices, evenly spread."""
    return torch.linspace(0, count - 1, min(count, _MAX_OUTPUTS)).round().long()
