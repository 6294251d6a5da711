"""Communication between processes: generated stubs, channels, servers, tokens, and Unix sockets."""
