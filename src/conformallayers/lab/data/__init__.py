"""Image sets: find, fetch, check and read them."""
