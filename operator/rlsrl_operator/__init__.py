"""The Kubernetes operator of rlsrl experiments."""
