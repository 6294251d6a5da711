"""Versioned policy parameters: the database and the shared-memory broadcast."""
