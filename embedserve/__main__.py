"""`python -m embedserve` is the command line."""

from embedserve.cli import main

main()
