"""Trained networks that ship with the package: ``cl.zoo.list()`` and ``cl.zoo.load(name)``."""

from .catalogue import list_records as list
from .catalogue import load
from .records import Record, Records

__all__ = ["Record", "Records", "list", "load"]
