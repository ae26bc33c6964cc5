"""Why a tick cannot be compiled, or not in one way; these never reach the user."""


class UntraceableError(Exception):
    """A tick cannot be recorded: it does something that compiled code cannot."""


class DivergesError(UntraceableError):
    """A tick diverges, which is for the eager engine to handle."""


class TooLargeError(Exception):
    """A tick has too many scalar operations."""
