"""Which modules may stand in a ConformalLayers: their bounds, checks and suggestions."""
