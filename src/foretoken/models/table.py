"""The documented path of :class:`TableModel`, which lives in :mod:`foretoken.models.other.table`."""

from foretoken.models.other.table import TableModel as TableModel
