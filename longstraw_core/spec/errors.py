"""The error types of the whole system, one per thing the caller can do about it; knows no exit codes."""


class LongStrawError(Exception):
    """Base of every error that is reported to a person as one line instead of a traceback."""


class SpecError(LongStrawError):
    """The specification, a flag or a file named by it is wrong: fix it and run again."""


class DataRefused(LongStrawError):
    """A data row, prompt or response cannot be used; the message names file and line or record id."""


class IntegrityError(LongStrawError):
    """Bytes differ from what was published: do not trust this artifact."""


class IncompleteRun(LongStrawError):
    """Everything that is there is as published, but a run lacks stages: it did not finish, or receipts were removed."""


class NumericError(LongStrawError):
    """A value is non-finite or two computations disagree: no optimizer step may be taken."""


class Retryable(LongStrawError):
    """The environment failed (storage, network, another holder of a lock): the same command may succeed later."""


class StageFailed(LongStrawError):
    """A stage ended for a reason that none of the other types names (a crash, a kill)."""
