"""XLA's own operations with the semantics of `detjax.ops`, under no contract, for comparison with detjax.

Here XLA chooses tiles, splits and fusions by shape, as in any JAX program. This backend is used only when it is
requested by name: in benchmarks, in the demo, and as the negative control of the tests. JAX differentiates and batches
its operations itself; see `detjax.ops.dispatch.Operation`.
"""
