"""The wire: generated stubs, channels, servers, tokens."""
