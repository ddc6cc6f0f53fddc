"""The error that ends a job with exit code 2: the configuration or the input must be mended."""


class InputError(ValueError):
    """Bad configuration or input; the message names the file, the row or the key."""
