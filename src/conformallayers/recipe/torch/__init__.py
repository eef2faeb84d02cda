"""The torch runtime of recipes."""
