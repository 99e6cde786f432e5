"""A jaxpr that one can rewrite: graph, cost, minimal cut, partition and accumulation.

The package exports nothing: it is shared by the engines, which import from its modules.
"""
