"""The light half of the health layer: imports neither vLLM nor vllm_omni."""
