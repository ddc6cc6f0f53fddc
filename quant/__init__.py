"""Weights: a checkpoint becomes int8 tensors, named by their content and shared through Ray."""
