"""`python -m ops.cli` is the console script `prism`."""

from ops.cli.app import main

main()
