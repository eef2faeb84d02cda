"""Trained networks that ship with the package: ``cl.zoo.list()`` and ``cl.zoo.load(name)``."""

from .catalogue import Record, RecordList, load
from .catalogue import list_records as list

__all__ = ["Record", "RecordList", "list", "load"]
