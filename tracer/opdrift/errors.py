"""Every error that opdrift raises; messages say what happened, with the values, and what to do.

    OpdriftError
      |- TraceExistsError         the path is taken, and overwrite was not asked for
      |- TraceNotWritableError    the folder cannot be written
      |- NotATraceError           the path holds no trace
      |- TraceVersionError        the trace was written by a newer opdrift
      |- DamagedTraceError        the trace's header or tables cannot be read at all
      |- IncomparableTracesError  two traces that cannot be held against each other
      |- CheckpointError          a checkpoint that cannot be read, or is of another model
      |- ExportError              a trace could not be exported, or not all of it
      |- RecorderStateError       a recorder used twice, or outside its `with`
      |- InvalidOptionError       an argument outside its range

docs/messages.md says what to do about each.
"""

from __future__ import annotations


class OpdriftError(Exception):
    """Base of every error that opdrift raises on purpose."""


class TraceExistsError(OpdriftError):
    """The path to record to is taken; nothing was overwritten."""


class TraceNotWritableError(OpdriftError):
    """The trace cannot be created or written where it was asked for."""


class NotATraceError(OpdriftError):
    """The path exists or not, but it holds no opdrift trace."""


class TraceVersionError(OpdriftError):
    """The trace has a schema that this version of opdrift does not know."""


class DamagedTraceError(OpdriftError):
    """The trace is one, but what makes it readable is damaged."""


class IncomparableTracesError(OpdriftError):
    """Two traces that cannot be compared, and why."""


class CheckpointError(OpdriftError):
    """A checkpoint that cannot be read, or that is of another model than the trace."""


class ExportError(OpdriftError):
    """A trace was not exported, or not all of it: a library is missing, a file in the way, a receiver refused."""


class RecorderStateError(OpdriftError):
    """A recorder was used outside its life: entered twice, or marked after it was closed."""


class InvalidOptionError(OpdriftError):
    """An option has a value that opdrift does not accept."""
