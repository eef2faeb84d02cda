"""Commands of the command line that have files of their own; heavy imports wait in each of them."""
