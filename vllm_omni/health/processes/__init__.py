"""Processes and their ends: the supervisor thread, what it watches, and what they leave behind."""
