"""Hung or busy: pings of replicas, beats of event loops, evidence of the kernel."""
