"""The only assembler: from a role's resolved config to the parts its worker runs with, through ordinary constructors.

One module a role, so that a role imports what it runs with and nothing else: an actor never sees torch.
"""
