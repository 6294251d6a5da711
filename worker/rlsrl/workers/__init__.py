"""The roles of an experiment, and the one place that assembles them."""
