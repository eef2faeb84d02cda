"""From a model to a folded network; README.md walks through it."""
