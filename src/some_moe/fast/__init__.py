"""The CUDA side: the same parameters and state dict, another forward."""
