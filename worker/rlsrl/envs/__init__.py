"""Environments: factory, vectorisation, spread over actors."""
