"""Train, checkpoint, resume and evaluate."""
