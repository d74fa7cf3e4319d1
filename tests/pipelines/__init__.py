"""Tests of the pipelines."""
