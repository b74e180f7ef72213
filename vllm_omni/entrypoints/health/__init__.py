"""The server process: its HTTP side and its life."""
