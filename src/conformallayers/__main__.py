"""Run the command line as ``python -m conformallayers``, which torchrun needs."""

from .cli.app import main

main()
