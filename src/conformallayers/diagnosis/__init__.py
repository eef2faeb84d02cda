"""A health check of models: measure a batch on its way, and compare what is seen with what works."""
