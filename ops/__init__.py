"""What an operator runs: the command line, benchmarks, deployment files."""
