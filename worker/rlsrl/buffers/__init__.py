"""What stands between received slots and a training batch."""
