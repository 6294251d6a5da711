"""The model behind ``rlsrl size``: how fast an experiment will train, what limits it, and what to change."""
