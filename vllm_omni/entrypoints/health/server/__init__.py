"""The server process from its command line to its exit status."""
