"""Networks as files; nothing is imported here, so that the numpy runtime can read without torch."""
