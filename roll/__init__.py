"""roll: RL post-training of language models with DeepSpeed, vLLM and Ray, composed with Hydra."""

__version__ = "0.1.0"
