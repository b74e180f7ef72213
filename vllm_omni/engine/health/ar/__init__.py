"""Autoregressive stages: the engine core's process, its workers, the channel between them."""
