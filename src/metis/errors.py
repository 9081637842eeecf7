"""Every error that Metis raises on purpose, and whose fault it is.

MetisError
├── ConfigError            the user's: a file, a key, an argument; nothing has started yet
│   └── DataError          a data set that is missing, damaged or cannot be divided as asked
├── LearnerError           a learner's: the federation goes on without its update
│   ├── UnexpectedUpdate   an update that answers no open task; it changed nothing
│   └── Diverged           local training left the finite numbers
└── InternalError          ours: please report it
"""


class MetisError(Exception):
    """One clear sentence: what was wrong, where, and what is allowed."""


class ConfigError(MetisError):
    """The user asked for something that cannot be."""


class DataError(ConfigError):
    """A data set is missing, damaged, or cannot be divided as asked."""


class LearnerError(MetisError):
    """A learner did something that the federation survives."""


class UnexpectedUpdate(LearnerError):
    """An update that answers no open task; the controller's state is unchanged."""


class Diverged(LearnerError):
    """Local training produced numbers that are not finite."""


class InternalError(MetisError):
    """A bug in Metis."""
