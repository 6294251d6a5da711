"""The local controller behind rlsrl run."""
