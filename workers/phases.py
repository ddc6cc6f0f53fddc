"""Where an engine's time goes."""

import time
from dataclasses import dataclass, field


@dataclass
class Phases:
    """Seconds since the engine was built, by what they were spent on.

    Attributes:
        prefill: passes of the model, as far as prompt tokens took part in them.
        verify: the rest of the passes: a token of each decoding row, and the drafted ones.
        draft: proposing, and choosing how much of it to verify.
        accept: from logits to tokens, stop conditions included.
        host: all else: admitting, planning and retiring rows.
    """

    prefill: float = 0.0
    verify: float = 0.0
    draft: float = 0.0
    accept: float = 0.0
    host: float = 0.0
    _since: float = field(default=0.0, repr=False)

    def start(self) -> None:
        """Begin to count."""
        self._since = time.perf_counter()

    def lap(self, name: str) -> float:
        """Count the time since the last call as `name`; returns it."""
        seconds = self._elapsed()
        setattr(self, name, getattr(self, name) + seconds)
        return seconds

    def lap_pass(self, num_prompt_tokens: int, num_other_tokens: int) -> float:
        """Count it as a pass of the model over so many tokens; returns it."""
        seconds = self._elapsed()
        share = num_prompt_tokens / (num_prompt_tokens + num_other_tokens)
        self.prefill += seconds * share
        self.verify += seconds * (1 - share)
        return seconds

    def _elapsed(self) -> float:
        now = time.perf_counter()
        seconds, self._since = now - self._since, now
        return seconds
