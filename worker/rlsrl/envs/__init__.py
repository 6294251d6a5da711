"""Environments: how they are made, wrapped, and stepped straight into slots."""
