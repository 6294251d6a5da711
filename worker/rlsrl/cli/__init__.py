"""The rlsrl command."""
