"""Health checks: run a batch through a model, measure every layer, and warn of unusual values."""
