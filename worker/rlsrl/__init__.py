"""Distributed reinforcement learning on one machine or a Kubernetes cluster, from one YAML.

Folders are layers, from the bottom: ``api`` (the spec), ``data`` (arrays), ``rpc`` (the wire), ``runtime`` (what every
process needs), then ``streams``, ``parameters``, ``buffers`` and ``envs`` side by side, ``policies``, ``algorithms``,
``workers`` (the roles), ``local`` (the controller behind ``rlsrl run``) and ``cli``.
"""
