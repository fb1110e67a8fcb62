"""Every exception that paceline raises on its own account.

    PacelineError
      ArgumentError            a value that cannot work (also a ValueError)
      BackendUnavailableError  the named communication backend is not to be had here
      ReplicaMismatchError     ranks hold different models
      UnusedParametersError    a step left parameters without gradient, and that was not allowed
      GradientError            a gradient was taken away before it could be averaged
      GraphChangedError        a graph that was declared static changed
      CommunicationError       the ranks could not finish a collective
        CollectiveTimeoutError   a rank did not come before the deadline
        PeerLostError            a rank's process ended or its connection broke
        RanksOutOfStepError      ranks met in a collective while at different steps
        PeerFailedError          a rank says that its own backward raised
      NonFiniteError           the gradient stays NaN or infinite, step after step
      CheckpointError          a checkpoint is missing, torn or does not fit
      LaunchError              the ranks could not be started

All of them are RuntimeErrors too (ArgumentError is a ValueError instead), because
that is what callers of torch's own classes catch.
"""


class PacelineError(Exception):
    """Root of the tree: catch this to catch whatever paceline raises itself."""


class ArgumentError(PacelineError, ValueError):
    """A value that cannot work; the text names it and says what to write instead."""


class BackendUnavailableError(PacelineError, RuntimeError):
    """The named backend cannot serve here; the text names those that can."""


class ReplicaMismatchError(PacelineError, RuntimeError):
    """Ranks hold different models; the text names the first parameter that differs."""


class UnusedParametersError(PacelineError, RuntimeError):
    """A step left parameters without gradient while find_unused_parameters=False."""


class GradientError(PacelineError, RuntimeError):
    """A gradient cannot be averaged: a hook on the parameter took it away."""


class GraphChangedError(PacelineError, RuntimeError):
    """With static_graph=True, a step used other parameters than the first one."""


class CommunicationError(PacelineError, RuntimeError):
    """The ranks could not finish a collective.

    Attributes:
        reason: the part of the text behind "because", for whoever knows better what was under way.
        ranks: the ranks of the whole job it is put down to, where the process group knows them.
    """

    reason: str = ""
    ranks: tuple[int, ...] = ()


class CollectiveTimeoutError(CommunicationError):
    """A rank did not come to a collective before the process group's timeout."""


class PeerLostError(CommunicationError):
    """The process of another rank ended, or the connection to it broke."""


class RanksOutOfStepError(CommunicationError):
    """Ranks met in one collective while being at different steps or bucket plans."""


class PeerFailedError(CommunicationError):
    """Another rank's backward raised an exception; this step has no average."""


class NonFiniteError(PacelineError, RuntimeError):
    """The gradient of many steps in a row is NaN or infinite; the text names the rank whose loss is."""


class CheckpointError(PacelineError, RuntimeError):
    """A checkpoint is missing, incomplete, or does not fit what it is loaded into."""


class LaunchError(PacelineError, RuntimeError):
    """The launcher could not start the ranks."""
