"""What clients meet: probes, admission, answers at a fault."""
