"""Families' torch side: a model_spec flows in; a model_shape or a transformers model flows out."""
