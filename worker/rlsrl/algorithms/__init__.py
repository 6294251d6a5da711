"""Pure losses and returns, and the Learner that steps them."""
