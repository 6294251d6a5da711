"""Runs and their policies for Python programs: what ``import rlsrl`` offers. The command line uses the same code."""
