"""A jaxpr that one can rewrite, and rewrites that autodiff and the engines share.

The package exports nothing. `jaxpipe.ir.graph` has the program and what one can ask of it, and
`jaxpipe.ir.transforms` what makes other programs of it.
"""
