"""What an engine has done so far, for those who look on."""

from collections import deque
from dataclasses import dataclass, field

_STEPS_KEPT = 4096  # Whose times nobody has asked for yet.


@dataclass
class Tally:
    """Counts since the engine was built, and how full it is; written by its thread, read by any.

    Attributes:
        num_slots: rows that the engine can generate at once.
        num_samples: answered, or refused.
        num_tokens: generated.
        num_steps: passes of the model.
        num_spec_steps: of a row, with something drafted.
        num_rows: under way now.
        num_waiting: requests without a row yet.
        step_seconds: of the steps since they were last taken.
    """

    num_slots: int = 0
    num_samples: int = 0
    num_tokens: int = 0
    num_steps: int = 0
    num_spec_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    num_rows: int = 0
    num_waiting: int = 0
    step_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_STEPS_KEPT))

    def count_step(self, seconds: float) -> None:
        """Count a pass."""
        self.num_steps += 1
        self.step_seconds.append(seconds)

    def count_tokens(self, num_tokens: int, num_drafted: int, num_accepted: int) -> None:
        """Count what a pass gave one row."""
        self.num_tokens += num_tokens
        self.num_draft_tokens += num_drafted
        self.num_accepted_draft_tokens += num_accepted
        self.num_spec_steps += num_drafted > 0

    def count_samples(self, num_samples: int, num_rows: int, num_waiting: int) -> None:
        """Count samples that are done, and say what is left."""
        self.num_samples += num_samples
        self.num_rows, self.num_waiting = num_rows, num_waiting

    def to_dict(self) -> dict[str, int]:
        """The counts."""
        return {k: v for k, v in vars(self).items() if k != "step_seconds"}

    def take_step_seconds(self) -> list[float]:
        """The times of the steps since the last call."""
        taken = []
        while self.step_seconds:
            taken.append(self.step_seconds.popleft())
        return taken
