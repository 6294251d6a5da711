"""Fakes and conformance suites for tests, shipped and typed."""
