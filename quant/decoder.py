"""The decoder in plain float arithmetic, one layer at a time over whole texts.

Calibration and the fidelity report look at every layer's inputs and hold one layer in memory; the model
that generates (`workers.model`) holds them all, has a cache and knows no texts. A layer's linears are
applied by a function that the caller hands in, so that it may look at their inputs, or quantize them.

Legend: T tokens of all texts, C model width, K inputs and J outputs of a fused group of linears,
H query heads, G key/value heads, D head size, V vocabulary.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from quant.architecture import Architecture
from quant.checkpoint import Checkpoint, LinearGroup, layer_names, linear_groups

# A layer's tensors by their names within the layer, such as "self_attn.q_proj.weight".
LayerTensors = dict[str, torch.Tensor]
# The outputs [T, J] of a fused group of linears for its inputs [T, K].
Apply = Callable[[LinearGroup, torch.Tensor], torch.Tensor]


def read_layer(
    checkpoint: Checkpoint, index: int, dtype: torch.dtype | None = None
) -> LayerTensors:
    """A layer of a floating-point checkpoint, in `dtype`, or as it is stored."""
    names = layer_names(checkpoint.architecture)
    layer = {name: checkpoint.read(f"model.layers.{index}.{name}") for name in names}
    return layer if dtype is None else {name: t.to(dtype) for name, t in layer.items()}


def fused_weight(layer: LayerTensors, group: LinearGroup) -> torch.Tensor:
    """The weights [J, K] of a group, one projection below the other."""
    return torch.cat([layer[f"{linear}.weight"] for linear in group.linears])


def fused_scale(layer: LayerTensors, group: LinearGroup) -> torch.Tensor:
    """The scales [J] of an int8 group."""
    return torch.cat([layer[f"{linear}.weight_scale"] for linear in group.linears]).flatten()


def fused_bias(layer: LayerTensors, group: LinearGroup) -> torch.Tensor | None:
    """The biases [J] of a group, or None."""
    if not group.has_bias:
        return None
    return torch.cat([layer[f"{linear}.bias"] for linear in group.linears])


def apply_float(layer: LayerTensors, architecture: Architecture) -> Apply:
    """The layer's linears as they are."""
    fused = {
        group.name: (fused_weight(layer, group), fused_bias(layer, group))
        for group in linear_groups(architecture)
    }
    return lambda group, x_TK: F.linear(x_TK, *fused[group.name])


def forward_layer(
    layer: LayerTensors,
    architecture: Architecture,
    index: int,
    x_TC: torch.Tensor,
    lengths: Sequence[int],
    apply: Apply,
) -> torch.Tensor:
    """The residual stream [T, C] behind a layer, for whole texts without a cache.

    Args:
        layer: its tensors; norms are taken from here, linears from `apply`.
        architecture: the checkpoint's shape.
        index: which layer it is.
        x_TC: the residual stream before it, all texts one behind the other.
        lengths: tokens of each text.
        apply: the linears.
    """
    qkv, o, gate_up, down = linear_groups(architecture)
    eps = architecture.norm_eps
    normed_TC = rms_norm(x_TC, layer["input_layernorm.weight"], eps)
    mixed_TJ = attend(layer, architecture, index, apply(qkv, normed_TC), lengths)
    x_TC = x_TC + apply(o, mixed_TJ)
    normed_TC = rms_norm(x_TC, layer["post_attention_layernorm.weight"], eps)
    return x_TC + apply(down, gated(apply(gate_up, normed_TC)))


def gated(gate_up_TJ: torch.Tensor) -> torch.Tensor:
    """Silu(gate) * up, gate first."""
    gate_TK, up_TK = gate_up_TJ.chunk(2, dim=-1)
    return F.silu(gate_TK) * up_TK


def attend(
    layer: LayerTensors,
    architecture: Architecture,
    index: int,
    qkv_TJ: torch.Tensor,
    lengths: Sequence[int],
) -> torch.Tensor:
    """Causal attention [T, H D] within each text, from the fused projection [T, (H + 2 G) D]."""
    a = architecture
    all_THD = qkv_TJ.unflatten(1, (-1, a.head_dim))
    q_THD, k_TGD, v_TGD = all_THD.split([a.num_heads, a.num_kv_heads, a.num_kv_heads], dim=1)
    if a.qk_norm:
        q_THD = rms_norm(q_THD, layer["self_attn.q_norm.weight"], a.norm_eps)
        k_TGD = rms_norm(k_TGD, layer["self_attn.k_norm.weight"], a.norm_eps)
    tables = rotary_table(architecture, max(lengths))
    cos, sin = (torch.cat([table[:n] for n in lengths]).to(qkv_TJ.dtype) for table in tables)
    q_THD, k_TGD = rotate(q_THD, cos, sin), rotate(k_TGD, cos, sin)
    window = a.windows[index]
    texts = zip(*(part.split(list(lengths)) for part in (q_THD, k_TGD, v_TGD)), strict=True)
    return torch.cat([_attend_text(*text, window=window) for text in texts])


def _attend_text(
    q_nHD: torch.Tensor, k_nGD: torch.Tensor, v_nGD: torch.Tensor, *, window: int
) -> torch.Tensor:
    q_HnD, k_GnD, v_GnD = (part.transpose(0, 1) for part in (q_nHD, k_nGD, v_nGD))
    n, repeats = q_nHD.shape[0], q_nHD.shape[1] // k_nGD.shape[1]
    mask_nn = torch.ones(n, n, dtype=torch.bool).tril()
    if window:
        mask_nn = mask_nn.triu(1 - window)
    k_HnD, v_HnD = (part.repeat_interleave(repeats, 0) for part in (k_GnD, v_GnD))
    out_HnD = F.scaled_dot_product_attention(q_HnD, k_HnD, v_HnD, attn_mask=mask_nn)
    return out_HnD.transpose(0, 1).flatten(1)


def rms_norm(x: torch.Tensor, gain: torch.Tensor, eps: float) -> torch.Tensor:
    """X / rms(x) * gain over the last dimension."""
    return F.rms_norm(x, gain.shape, gain, eps)


def rotate(x_THD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs (i, i + D / 2) of every head; cos and sin are [T, D / 2]."""
    low, high = x_THD.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)


def rotary_table(architecture: Architecture, max_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [max_len, D / 2] in float64."""
    inv_freq = torch.tensor(architecture.rope_inv_freq, dtype=torch.float32)
    angles = torch.outer(torch.arange(max_len, dtype=torch.float32), inv_freq).double()
    return angles.cos() * architecture.rope_scaling, angles.sin() * architecture.rope_scaling
