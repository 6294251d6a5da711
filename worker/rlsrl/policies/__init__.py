"""Networks, policies, and the actors that draw actions from them."""
