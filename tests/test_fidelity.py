"""How far two models' predictions are apart: every number against one worked out by hand or by loops."""

import math

import pytest
import torch

from quant.fidelity import MARGIN_EDGES, Fidelity, compare


def of_probabilities(*rows: tuple[float, ...]) -> torch.Tensor:
    """Logits with these probabilities: logarithms, moved by a constant that must not matter."""
    return torch.tensor([[math.log(p) + 3 * i for p in row] for i, row in enumerate(rows)])


def of_columns(
    kl: list[float], agrees: list[bool] | None = None, margins: list[float] | None = None
) -> Fidelity:
    """A result with the given columns, and losses of 0."""
    zeros = torch.zeros(len(kl))
    return Fidelity(
        agrees_T=torch.tensor([True] * len(kl) if agrees is None else agrees),
        kl_T=torch.tensor(kl),
        margin_T=zeros if margins is None else torch.tensor(margins),
        reference_nll_T=zeros,
        nll_T=zeros,
    )


def random_pair(num_tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two models that mostly agree, and the tokens that follow."""
    generator = torch.Generator().manual_seed(seed)
    reference_TV = 2 * torch.randn(num_tokens, 11, generator=generator)
    logits_TV = reference_TV + 0.7 * torch.randn(num_tokens, 11, generator=generator)
    return reference_TV, logits_TV, torch.randint(11, (num_tokens,), generator=generator)


def naive(
    reference_TV: torch.Tensor, logits_TV: torch.Tensor, next_T: torch.Tensor
) -> dict[str, list[float]]:
    """The same columns by loops over Python floats."""
    columns: dict[str, list[float]] = {n: [] for n in ("agrees", "kl", "margin", "ref", "nll")}
    for p_logits, q_logits, token in zip(
        reference_TV.tolist(), logits_TV.tolist(), next_T.tolist(), strict=True
    ):
        p = [math.exp(x) / sum(map(math.exp, p_logits)) for x in p_logits]
        q = [math.exp(x) / sum(map(math.exp, q_logits)) for x in q_logits]
        ranked = sorted(p_logits, reverse=True)
        columns["agrees"].append(p.index(max(p)) == q.index(max(q)))
        columns["kl"].append(sum(a * math.log(a / b) for a, b in zip(p, q, strict=True)))
        columns["margin"].append(ranked[0] - ranked[1])
        columns["ref"].append(-math.log(p[token]))
        columns["nll"].append(-math.log(q[token]))
    return columns


def test_by_hand() -> None:
    reference = of_probabilities((1 / 2, 1 / 4, 1 / 4), (1 / 8, 1 / 8, 3 / 4))
    model = of_probabilities((1 / 4, 1 / 2, 1 / 4), (1 / 4, 1 / 4, 1 / 2))
    result = compare(reference, model, torch.tensor([0, 2]))
    assert result.agrees_T.tolist() == [False, True]
    # 1/2 log 2 + 1/4 log 1/2, and 1/8 log 1/2 twice + 3/4 log 3/2.
    first, second = math.log(2) / 4, -math.log(2) / 4 + 3 / 4 * math.log(3 / 2)
    assert result.kl_T.tolist() == pytest.approx([first, second], rel=1e-5)
    assert result.margin_T.tolist() == pytest.approx([math.log(2), math.log(6)], rel=1e-5)
    assert result.agreement == 0.5
    assert result.mean_kl == pytest.approx((first + second) / 2, rel=1e-5)
    report = result.to_dict()
    assert report["num_tokens"] == 2
    assert report["top1_agreement"] == 0.5
    assert report["top1_agreement_standard_error"] == pytest.approx(math.sqrt(1 / 8))
    # The text has probability 1/2 * 3/4 under the one, 1/4 * 1/2 under the other: a third.
    assert report["perplexity_ratio"] == pytest.approx(math.sqrt(3), rel=1e-5)
    assert report["num_flips"] == 1
    assert {k for k, v in report["flip_margins"].items() if v} == {"<=1.0"}  # log 2 = 0.69


def test_divergence_has_a_direction() -> None:
    reference = of_probabilities((0.9, 0.1))
    model = of_probabilities((0.5, 0.5))
    following = torch.tensor([0])
    forward = 0.9 * math.log(1.8) + 0.1 * math.log(0.2)
    backward = 0.5 * math.log(5 / 9) + 0.5 * math.log(5)
    assert compare(reference, model, following).mean_kl == pytest.approx(forward, rel=1e-5)
    assert compare(model, reference, following).mean_kl == pytest.approx(backward, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_against_loops(dtype: torch.dtype) -> None:
    reference_TV, logits_TV, next_T = random_pair(50, seed=1)
    reference_TV, logits_TV = reference_TV.to(dtype), logits_TV.to(dtype)
    result = compare(reference_TV, logits_TV, next_T)
    expected = naive(reference_TV, logits_TV, next_T)
    assert 0 < sum(expected["agrees"]) < 50
    assert result.agrees_T.tolist() == expected["agrees"]
    for column, name in (
        (result.kl_T, "kl"),
        (result.margin_T, "margin"),
        (result.reference_nll_T, "ref"),
        (result.nll_T, "nll"),
    ):
        assert column.dtype == torch.float32
        assert column.tolist() == pytest.approx(expected[name], rel=1e-4, abs=1e-5), name


def test_identical_models() -> None:
    reference_TV, _, next_T = random_pair(40, seed=2)
    report = compare(reference_TV, reference_TV.clone(), next_T).to_dict()
    assert report["top1_agreement"] == 1
    assert report["top1_agreement_standard_error"] == 0
    assert report["mean_kl"] == report["p99_kl"] == 0
    assert report["perplexity_ratio"] == 1
    assert report["num_flips"] == sum(report["flip_margins"].values()) == 0


def test_nearly_identical_models_have_no_negative_divergence() -> None:
    """Rounding alone would put a sum of products below zero."""
    reference_TV, _, next_T = random_pair(2000, seed=3)
    noise_TV = 1e-5 * torch.randn(reference_TV.shape)
    result = compare(reference_TV, reference_TV + noise_TV, next_T)
    assert (result.kl_T >= 0).all()
    assert result.mean_kl < 1e-6


def test_the_sum_of_two_texts_is_the_whole() -> None:
    reference_TV, logits_TV, next_T = random_pair(31, seed=4)
    whole = compare(reference_TV, logits_TV, next_T)
    first, second = (
        compare(reference_TV[cut], logits_TV[cut], next_T[cut])
        for cut in (slice(0, 12), slice(12, None))
    )
    total = first + second
    for name in ("agrees_T", "kl_T", "margin_T", "reference_nll_T", "nll_T"):
        assert torch.equal(getattr(total, name), getattr(whole, name)), name
    assert total.to_dict() == whole.to_dict()
    # Positions count alike, not texts: the mean of the two means would be another number.
    assert total.mean_kl == pytest.approx((12 * first.mean_kl + 19 * second.mean_kl) / 31)
    assert abs(total.mean_kl - (first.mean_kl + second.mean_kl) / 2) > 1e-3


def test_the_99th_percentile() -> None:
    """Of 0, 1, ..., 200 it is 198; between two positions it is interpolated."""
    shuffled = [float(37 * i % 201) for i in range(201)]
    assert of_columns(shuffled).to_dict()["p99_kl"] == 198
    assert of_columns([0.0, 1.0]).to_dict()["p99_kl"] == pytest.approx(0.99)


def test_flips_by_the_margin_of_the_reference() -> None:
    """Only flips count, each once: on the edge it belongs below it."""
    flips = [0.0, 0.04, 0.07, 0.15, 0.5, 0.51, 1.0, 1.5, 1.75, 2.0, 2.01, 50.0]
    kept = [0.01, 0.3, 0.3, 9.0]
    agrees = [False] * len(flips) + [True] * len(kept)
    fidelity = of_columns([0.0] * len(agrees), agrees, flips + kept)
    report = fidelity.to_dict()
    assert report["num_flips"] == 12
    assert report["top1_agreement"] == 0.25
    assert report["flip_margins"] == {
        "<=0.05": 2,
        "<=0.1": 1,
        "<=0.2": 1,
        "<=0.5": 1,
        "<=1.0": 2,
        "<=2.0": 3,
        "more": 2,
    }
    assert len(MARGIN_EDGES) == 6


def test_the_margin_is_the_references_not_the_models() -> None:
    reference = torch.tensor([[1.0, 0.7, -5.0]])
    model = torch.tensor([[0.0, 9.0, -5.0]])
    report = compare(reference, model, torch.tensor([0])).to_dict()
    assert {k: v for k, v in report["flip_margins"].items() if v} == {"<=0.5": 1}
