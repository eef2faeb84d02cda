"""Applications: data, training, experiments, reports, predictions."""
