"""Documented import path of :class:`TableModel`, see :mod:`foretoken.models.other.table`."""

from foretoken.models.other.table import TableModel as TableModel
