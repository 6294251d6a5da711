"""How samples and inference requests travel between workers."""
