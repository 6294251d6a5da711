"""How fast an experiment will train, what limits it and what to change, by a model instead of a run: ``rlsrl size``."""
