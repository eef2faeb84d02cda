"""The C99 runtime of recipes: one header and one source, without dependencies or allocation."""
