"""Predict the classes of images and arrays in files, one batch at a time."""
