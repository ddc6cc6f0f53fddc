"""Compute: an engine that drafts, verifies and accepts, and the actor around it."""
