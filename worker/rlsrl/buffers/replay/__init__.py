"""Replay: transitions that are kept after they were trained, and drawn again."""
