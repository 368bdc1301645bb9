"""`save` and `load` with their table filled: what can be saved is what `objects` and `fitted` put there."""

from measureflow.saving import fitted, objects
from measureflow.saving.container import FileFormatError
from measureflow.saving.documents import load, save

__all__ = ["FileFormatError", "fitted", "load", "objects", "save"]
