"""XLA's own operations with the semantics of `detjax.ops`, under no contract: what detjax is compared with.

Here XLA chooses tiles, splits and fusions by shape, as in any JAX program. This backend serves only where it is asked
for by name: in benchmarks, in the demo, and as the negative control of the tests. JAX differentiates and batches its
operations itself; see `detjax.ops.dispatch.Operation`.
"""
