"""Predictions for files: images and arrays in, the likeliest classes out, a few samples at a time."""
