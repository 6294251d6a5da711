"""The stream between a trainer rank and a shard of its replay store: one gRPC call, which the shard makes.

The rank asks for rows and says what became of them; the shard answers, and reports what its actors have sent. Each
message may come twice or not at all, since the call may break anywhere: counts are totals, and answers name the
training step that they are for. The token is in the call's metadata and is checked first.
"""
