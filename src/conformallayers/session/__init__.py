"""Run a fold in the engine that is fastest for it."""
