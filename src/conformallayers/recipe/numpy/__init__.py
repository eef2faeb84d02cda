"""The numpy runtime of recipes; it imports no torch."""
