"""Verification of a draft against the target model, token by token.

The token at a position is a function of the verifier's logits there, the row's parameters and one
uniform number keyed by (seed, sample, position). A drafted token is accepted if and only if it *is*
that token. For a draft that is a point mass this accepts with exactly the target's probability, as
rejection sampling does (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318), and the
token that replaces a rejected one is the very token plain decoding would have drawn. So drafts cannot
change an answer: not its distribution, and not its tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Acceptance:
    """The outcome of one verify step for one row.

    `token_ids` are the accepted tokens and, unless a stop came first, the recovered or bonus token
    behind them. `num_accepted` counts the drafted tokens among them.
    """

    token_ids: tuple[int, ...]
    num_accepted: int


def accept(
    draft: Sequence[int],
    next_token: Callable[[int], int],
    ends: Callable[[int], bool],
) -> Acceptance:
    """Walk through a draft until the target disagrees, the answer ends or the draft is used up.

    Args:
        draft: the drafted tokens.
        next_token: the target's token at window position j, given that draft[:j] was accepted;
            called with 0, 1, ... in order and never past the first rejection.
        ends: told each token as it becomes part of the answer; True if the answer ends with it.
    """
    token_ids: list[int] = []
    num_accepted = 0
    for j in range(len(draft) + 1):
        token_id = next_token(j)
        token_ids.append(token_id)
        accepted = j < len(draft) and token_id == draft[j]
        num_accepted += accepted
        if ends(token_id) or not accepted:
            break
    return Acceptance(tuple(token_ids), num_accepted)
