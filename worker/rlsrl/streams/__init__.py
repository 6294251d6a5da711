"""Streams between workers: samples from actors to trainers, and inference requests to policy workers."""
