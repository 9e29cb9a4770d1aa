"""The compilation and identity of programs: backends, compiler options, the environment, fingerprints.

Read `backends` and `compilation` first. `environment` and `jax_options` read the settings that bits depend on, and
`fingerprints` summarizes them.
"""
