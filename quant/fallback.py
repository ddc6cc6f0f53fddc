"""Which groups of linears stay in bfloat16: the worst ones, until the model is close enough.

Groups are left out in the order of the error they put into the residual stream per byte that keeping
them costs. How close the model is with some of them left out is measured, not predicted: the quantized
decoder is run over texts and its first choices are compared with the original's.
"""

from collections.abc import Sequence
from dataclasses import replace

from quant.calibrate import Text, Treatment, texts_to_check
from quant.checkpoint import Checkpoint
from quant.config import QuantConfig
from quant.fidelity import Fidelity
from quant.quantize import ROUND_TO_NEAREST
from quant.simulate import measure, run_texts

_BYTES = 2  # Of a weight that stays in floating point.


def choose_float_groups(
    checkpoint: Checkpoint, config: QuantConfig, treatment: Treatment, texts: Sequence[Text]
) -> tuple[Treatment, Fidelity]:
    """Leave out the groups that `config.target_agreement` and `max_float_bytes` ask for.

    With both, as few as reach the target, within the bytes; with one, that one alone decides.

    Returns:
        The treatment, and how close the model then is on the texts that its scales were not fitted to.
    """
    texts = [texts[i] for i in texts_to_check(texts)]
    reference_TC = run_texts(checkpoint, config.reference(), ROUND_TO_NEAREST, texts)
    order = _worst_first(treatment, config)

    def trial(count: int) -> tuple[Treatment, Fidelity]:
        tried = replace(treatment, float_groups=frozenset(order[:count]))
        return tried, measure(checkpoint, config, tried, texts, reference_TC)

    if config.target_agreement is None:
        return trial(len(order))
    few, enough = 0, len(order)  # Bisection: the agreement rises with what stays in floating point.
    best = trial(enough)
    while few < enough:
        middle = (few + enough) // 2
        tried = trial(middle)
        if tried[1].agreement >= config.target_agreement:
            enough, best = middle, tried
        else:
            few = middle + 1
    return best


def _worst_first(treatment: Treatment, config: QuantConfig) -> list[tuple[int, str]]:
    """The groups that may be left out, in the order in which they are."""
    if config.target_agreement is None and config.max_float_bytes is None:
        return []
    order, used = [], 0
    for error in sorted(treatment.errors, key=lambda e: e.stream / e.num_weights, reverse=True):
        num_bytes = _BYTES * error.num_weights
        if config.max_float_bytes is None or used + num_bytes <= config.max_float_bytes:
            order.append((error.layer, error.group))
            used += num_bytes
    return order
