"""How far a quantized model's predictions are from the original's, token by token.

Teacher-forced: both models see the same text, and at every position their next-token distributions are
compared. (Kullback-Leibler divergence rather than accuracy alone: answers can flip without the accuracy
moving, arXiv 2407.09141.)

Legend: T positions, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch

# Upper edges of the margin histogram: the reference's first logit over its second, where a flip happened.
MARGIN_EDGES = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)


@dataclass(frozen=True)
class Fidelity:
    """Per position: agreement, divergence, and both models' loss on the text. `a + b` is both texts.

    `agrees_T` is bool, `kl_T` KL(reference || model) in nats, `margin_T` the reference's first logit less
    its second, `reference_nll_T` and `nll_T` the negative log-likelihoods of the text's next token.
    """

    agrees_T: torch.Tensor
    kl_T: torch.Tensor
    margin_T: torch.Tensor
    reference_nll_T: torch.Tensor
    nll_T: torch.Tensor

    def __add__(self, other: "Fidelity") -> "Fidelity":
        names = self.__dataclass_fields__
        return Fidelity(*(torch.cat([getattr(self, n), getattr(other, n)]) for n in names))

    @property
    def agreement(self) -> float:
        """Share of positions with the same first choice."""
        return float(self.agrees_T.float().mean())

    @property
    def mean_kl(self) -> float:
        """Mean divergence in nats."""
        return float(self.kl_T.mean())

    def to_dict(self) -> dict[str, Any]:
        """The numbers of a report."""
        count = len(self.agrees_T)
        flips = self.margin_T[~self.agrees_T]
        edges = torch.tensor(MARGIN_EDGES)
        counts = torch.bucketize(flips, edges).bincount(minlength=len(MARGIN_EDGES) + 1)
        spread = (self.agreement * (1 - self.agreement) / count) ** 0.5
        return {
            "num_tokens": count,
            "top1_agreement": self.agreement,
            "top1_agreement_standard_error": spread,
            "mean_kl": self.mean_kl,
            "p99_kl": float(self.kl_T.quantile(0.99)),
            "perplexity_ratio": float((self.nll_T.mean() - self.reference_nll_T.mean()).exp()),
            "num_flips": len(flips),
            "flip_margins": dict(
                zip([*(f"<={edge}" for edge in MARGIN_EDGES), "more"], counts.tolist(), strict=True)
            ),
        }


def compare(reference_TV: torch.Tensor, logits_TV: torch.Tensor, next_T: torch.Tensor) -> Fidelity:
    """Compare two models' logits at the same positions; `next_T` are the tokens that follow there."""
    reference_TV = reference_TV.float().log_softmax(dim=-1)
    logits_TV = logits_TV.float().log_softmax(dim=-1)
    top_T2 = reference_TV.topk(2, dim=-1).values
    return Fidelity(
        agrees_T=reference_TV.argmax(dim=-1) == logits_TV.argmax(dim=-1),
        kl_T=(reference_TV.exp() * (reference_TV - logits_TV)).sum(dim=-1).clamp(min=0),
        margin_T=top_T2[:, 0] - top_T2[:, 1],
        reference_nll_T=-reference_TV.gather(1, next_T[:, None])[:, 0],
        nll_T=-logits_TV.gather(1, next_T[:, None])[:, 0],
    )
