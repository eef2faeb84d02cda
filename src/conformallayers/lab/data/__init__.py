"""Find, fetch, check and load data sets of images."""
