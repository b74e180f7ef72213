"""The orchestrator's side of the health layer, and what runs in stage processes and workers."""
