"""What went wrong: faults as values, and which class of exception is which."""
