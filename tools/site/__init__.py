"""The documentation's site: MkDocs' hooks, and generators of benchmark pages, formulas and drawings."""
