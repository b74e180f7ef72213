"""The part of the health layer that imports neither vLLM nor vllm_omni, and so starts fast."""
