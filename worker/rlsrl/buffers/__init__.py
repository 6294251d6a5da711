"""Buffers between received slots and training batches."""
