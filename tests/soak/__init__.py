"""Attack every promise of docs/promises.md at random, for as long as one likes; run it with python -m."""
