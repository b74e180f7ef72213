"""Tiny models for vllm-omni stages that run anywhere and fail when a prompt says so."""
