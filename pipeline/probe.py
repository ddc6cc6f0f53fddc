"""Whether unequal workers answer alike: each kind is asked for the same few prompts."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from workers.config import SamplingParams

_LOGGER = logging.getLogger(__name__)

NUM_PROMPTS = 3
_MAX_TOKENS = 32
Answers = Mapping[str, Sequence[int]]  # Tokens by the row's id.


def probe_params(max_tokens: int) -> SamplingParams:
    """How a prompt is answered whose answer may have so many tokens: greedily, and not for long."""
    return SamplingParams(max_tokens=min(max_tokens, _MAX_TOKENS))


class Probe:
    """Takes in the kinds' answers, and tells once all are there."""

    def __init__(self, kinds: Sequence[str]) -> None:
        """Of kinds of these names; one kind agrees with itself."""
        self._kinds = kinds
        self._asked: set[int] = set()
        self._answers: dict[int, Answers] = {}

    def wants(self, number: int) -> bool:
        """Whether a kind, by its number, is to be asked: once, and only if there is another."""
        if len(self._kinds) == 1 or number in self._asked:
            return False
        self._asked.add(number)
        return True

    def hear(self, number: int, answers: Answers) -> None:
        """Take in a kind's answers."""
        self._answers[number] = answers
        if len(self._answers) == len(self._kinds):
            say = _LOGGER.info if self.to_dict()["num_equal"] == len(answers) else _LOGGER.warning
            say("%s", self)

    def to_dict(self) -> dict[str, Any]:
        """What is known: how many of the prompts every kind that answered gave the same tokens."""
        heard = list(self._answers.values())
        first = heard[0] if heard else {}
        equal = [row for row in first if all(one.get(row) == first[row] for one in heard)]
        return {
            "kinds": [self._kinds[number] for number in sorted(self._answers)],
            "num_prompts": len(first),
            "num_equal": len(equal),
        }

    def __str__(self) -> str:
        told = self.to_dict()
        kinds, total = " and ".join(told["kinds"]), told["num_prompts"]
        if told["num_equal"] == total:
            return f"{kinds} workers give the same tokens for {total} prompts"
        return (
            f"{kinds} workers give the same tokens for {told['num_equal']} of {total} prompts: near ties "
            "turn out either way, and an answer then depends on which of them gave it"
        )
