"""Diffusion stages: the replica's process or inline engine, its workers, the channel to it."""
