"""Random attacks on every promise, for as long as one likes; run it with python -m."""
