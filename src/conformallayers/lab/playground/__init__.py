"""The playground: one HTML page that runs folded networks in JavaScript."""
