"""Diptych: train vision-language models from raw images to a proven, scored release."""

__version__ = "0.1.0"
