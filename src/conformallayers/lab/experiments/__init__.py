"""The experiments of the paper and beyond."""
