"""Commands: the only place that knows the command line."""
