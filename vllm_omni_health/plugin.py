"""Entry points that vLLM and vllm-omni load in their processes."""


def register() -> None:
    """Called in every vLLM process."""


def register_omni() -> None:
    """Called in diffusion processes and omni workers."""
