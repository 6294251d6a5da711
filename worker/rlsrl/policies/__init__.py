"""Networks, policies, and the torch-free programs actors run."""
