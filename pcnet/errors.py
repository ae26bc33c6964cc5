"""Every error pcnet raises on purpose; each message names the culprit and the remedy."""


class PcnetError(Exception):
    """Base of all errors raised by pcnet."""


class SettingError(PcnetError, ValueError):
    """A setting is unknown, missing, or has a value that makes no sense."""


class ImmutableError(SettingError, AttributeError):
    """A setting was to be changed after it was made."""


class GraphError(PcnetError, ValueError):
    """The graph cannot be built or run as composed."""


class ScheduleError(PcnetError, ValueError):
    """A schedule asks for something that the graph does not have."""


class ObservationError(PcnetError, ValueError):
    """Observations do not fit the graph's sensory nodes."""


class DivergenceError(PcnetError, ArithmeticError):
    """A belief stopped being finite."""


class CheckpointError(PcnetError, ValueError):
    """A file to go on from is not what it should be."""


class SpecificationError(PcnetError, ValueError):
    """A description of a graph cannot be read, or a graph cannot be described."""


class StudyError(PcnetError, ValueError):
    """A study cannot do what it is asked for, or its file is not what it should be."""


class ResultError(PcnetError, KeyError):
    """A result was asked for something it does not hold."""

    def __str__(self) -> str:  # KeyError would print the repr of the message
        return str(self.args[0]) if self.args else ""
