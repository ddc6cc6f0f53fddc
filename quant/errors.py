"""The one error of this package that is the user's to mend."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be read or run; the message names the file and the reason."""
