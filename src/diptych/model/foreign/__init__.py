"""Checkpoints of other trainers: DeepSpeed's and torch's files in, safetensors out.

Such files are pickles, which can run code when they are read. So they are read by a process of
their own that has given up what it does not need (`core/sandbox.py`), and by readers that make
tensors and plain values alone (`pickles`). `deepspeed`, `distributed` and `whole` know a format
each, `fitting` the names that wrappers leave behind.
"""
