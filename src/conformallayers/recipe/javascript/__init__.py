"""The JavaScript runtime of recipes, for browsers and node."""
