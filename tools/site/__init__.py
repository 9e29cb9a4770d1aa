"""The makers of the documentation's site: MkDocs' hooks, and the makers of benchmark pages, formulas and drawings."""
